"""`tamis completion`: shell completion of commands, flags, models and methods."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tamis.cli.commands import COMMANDS
from tamis.cli.commands.config import parser_of
from tamis.cli.options import flags

SCRIPTS = {
    "bash": """\
# eval "$(tamis completion bash)" in ~/.bashrc
_tamis() {
    local IFS=$'\\n'
    COMPREPLY=($(tamis completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _tamis tamis
""",
    "zsh": """\
#compdef tamis
# eval "$(tamis completion zsh)" in ~/.zshrc, after compinit
_tamis() {
    local -a found
    found=("${(@f)$(tamis completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -- $found || _files
}
compdef _tamis tamis
""",
    "fish": """\
# tamis completion fish | source, in config.fish
complete -c tamis -f -a \\
    '(tamis completion --words (commandline -opc)[2..] (commandline -ct) 2>/dev/null; \\
      or __fish_complete_path (commandline -ct))'
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "shell",
        nargs="?",
        choices=SCRIPTS,
        help="shell whose completion script is printed (default: the shell that $SHELL names)",
    )
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print a shell's script, or the candidates that a script asks for."""
    if arguments.words is None:
        sys.stdout.write(SCRIPTS[arguments.shell or "bash"])
        return 0
    found = candidates(arguments.words)
    sys.stdout.write("".join(f"{word}\n" for word in found))
    return 0 if found else 1  # 1: the shell completes file names itself


def candidates(words: Sequence[str]) -> list[str]:
    """Completions of the last word, given the words before it; [] if a file is expected."""
    *before, last = words or [""]
    command = next((word for word in before if not word.startswith("-")), None)
    if command is None:
        return [name for name in (*COMMANDS, "--version", "--help") if name.startswith(last)]
    if command not in COMMANDS:
        return []
    parser = parser_of(command)
    if last.startswith("-"):
        return [name for name in flags(parser) if name.startswith(last)]
    known: Sequence[str] = ()
    for action in parser._actions:
        if before[-1] in action.option_strings and action.nargs != 0:
            known = list(map(str, action.choices or ())) or _known(action.dest)
            return [name for name in known if name.startswith(last)]
    if command in ("show", "rm", "pull", "methods"):
        known = _known({"methods": "attn"}.get(command, "model"))
    for action in parser._get_positional_actions():
        known = known or list(map(str, action.choices or ()))
    return [name for name in known if name.startswith(last)]


def _known(dest: str) -> list[str]:
    """The known values of a flag."""
    if dest == "model":
        from tamis.fetch.registry import KNOWN, installed

        there: list[str] = []
        with contextlib.suppress(OSError):
            there = [model.name for model in installed()]
        return list(dict.fromkeys([*there, *KNOWN]))
    if dest in ("attn", "prefill"):
        from tamis.select.notation import methods

        return ["dense", "auto", *methods()]
    return []


def of_message(text: str) -> list[tuple[str, int]]:
    """Completions of one of chat's commands that begins with `text`.

    Each has the number of characters at the end of `text` that it replaces.
    """
    from tamis.cli.conversation.repl import COMMANDS as IN_CHAT
    from tamis.cli.options import samplers

    if not text.startswith("/"):
        return []
    name, gap, rest = text[1:].partition(" ")
    if not gap:
        return [(f"/{word}", len(text)) for word in IN_CHAT if word.startswith(name)]
    known = {
        "set": [flag.field for flag in samplers.FLAGS],
        "model": _known("model") if name == "model" else [],
        "attn": _known("attn") if name == "attn" else [],
        "think": ["on", "off"],
    }.get(name)
    if known is not None:
        return [(word, len(rest)) for word in known if word.startswith(rest)]
    return [(path, len(rest)) for path in _paths(rest)] if name in ("read", "load", "save") else []


def _paths(start: str) -> list[str]:
    """Files and folders whose names begin with `start`, a hundred at most."""
    folder, _, name = start.rpartition("/")
    root = Path(os.path.expanduser(folder or ("/" if start.startswith("/") else ".")))
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.name.startswith(name) and (name or not path.name.startswith(".")):
                shown = f"{folder}/{path.name}" if "/" in start else path.name
                found.append(shown + "/" * path.is_dir())
    return found[:100]
