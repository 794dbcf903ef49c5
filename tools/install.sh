#!/bin/sh
# Installs the program in one file of a release, checked by its SHA-256: install.sh ADDRESS [FOLDER].
# ADDRESS: of a release's files, https://..., or a folder; FOLDER: where `tamis` goes (~/.local/bin).
set -eu
fetch() { # what it is called there, where it goes
    case $address in
    https://*)
        if command -v curl >/dev/null; then
            curl -fsSL --proto '=https' -o "$2" "$address/$1"
        else
            wget -qO "$2" "$address/$1"
        fi
        ;;
    /*) cp "$address/$1" "$2" ;;
    *)
        echo "error: ADDRESS is $address, expected https://... or /..." >&2
        exit 2
        ;;
    esac
}

main() {
    if [ $# -lt 1 ]; then
        echo "usage: install.sh ADDRESS [FOLDER]" >&2
        exit 2
    fi
    address=${1%/} folder=${2:-${HOME:?set HOME, or give a FOLDER}/.local/bin}
    machine=$(uname -s)-$(uname -m)
    if [ "$machine" != Linux-x86_64 ] && [ "$machine" != Linux-aarch64 ]; then
        echo "error: there is no program for $machine, only for Linux-x86_64 and Linux-aarch64" >&2
        exit 1
    fi
    part=$(mktemp -d)
    trap 'rm -rf "$part"' EXIT

    fetch SHA256SUMS "$part/SHA256SUMS"
    line=$(grep -E "  tamis-[^ /]*-linux-$(uname -m)\$" "$part/SHA256SUMS") || {
        echo "error: $address has no program for $machine" >&2
        exit 1
    }
    name=${line##* }
    fetch "$name" "$part/$name"
    (cd "$part" && echo "$line" | sha256sum -c --status -) || {
        echo "error: $name is not what SHA256SUMS says: fetch it again" >&2
        exit 1
    }
    mkdir -p "$folder"
    chmod 755 "$part/$name"
    mv "$part/$name" "$folder/tamis.part" && mv "$folder/tamis.part" "$folder/tamis"
    echo "$folder/tamis"
    case ":$PATH:" in
    *":$folder:"*) ;;
    *) echo "$folder is not in PATH: add it, or run $folder/tamis" >&2 ;;
    esac
}

main "$@" # at the end: half of this file does nothing
