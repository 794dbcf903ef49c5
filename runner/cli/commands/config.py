"""`tamis config`: the defaults of flags, their values and their origins."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tamis.cli.commands import COMMANDS, module_of
from tamis.cli.options import Parser, did_you_mean, settings
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note
from tamis.platform.private_files import write_whole

TEMPLATE = """\
# Defaults of tamis' flags, by their long names. Flags and variables such as TAMIS_TEMP come first.
# threads = 4

[chat]
# temp = 0.7

# For a model that is named with -m, whatever the command:
# [model."smollm2"]
# ctx = 4096
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=["show", "path", "init", "edit", "set", "unset"],
        default="show",
        help="show (the default): print what is set; path: print the path of the settings file; "
        "init: write a commented file; edit: open it in $EDITOR; set, unset: change KEY",
    )
    parser.add_argument(
        "key", nargs="?", help="long name of a flag, such as temp, run.temp or model.NAME.temp"
    )
    parser.add_argument("value", nargs="?", help="new value, as TOML or plain text")
    parser.add_argument("--json", action="store_true", help="print what is set as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show or change the file. Raises UsageError, SettingsError."""
    path = settings.config_file()
    if path is None:
        raise UsageError("TAMIS_CONFIG is empty, so there is no file: unset it")
    action, key, value = arguments.action, arguments.key, arguments.value
    if (action in ("set", "unset")) != (key is not None) or (action == "set") != (
        value is not None
    ):
        raise UsageError("write: tamis config set KEY VALUE, or: tamis config unset KEY")
    if action == "path":
        sys.stdout.write(f"{path}\n")
    elif action in ("init", "edit"):
        _make(path)
        if action == "edit":
            editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
            subprocess.run([*editor.split(), str(path)], check=True)
            _check(settings.read(path), path)
        sys.stdout.write(f"{path}\n")
    elif action == "show":
        _show(path, as_json=arguments.json)
    else:
        _change(path, key, value)
    return 0


def _make(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(path) as file:
            file.write(TEMPLATE.encode())


def _show(path: Path, *, as_json: bool) -> None:
    data = settings.read(path)
    _check(data, path)
    found = [
        {"command": command, "flag": f"--{name}", "value": setting.value, "origin": setting.origin}
        for command in COMMANDS
        for name, setting in _found(command)
    ]  # fmt: skip
    if as_json:
        sys.stdout.write(json.dumps({"path": str(path), "settings": found, "file": data}) + "\n")
        return
    state = "" if path.exists() else " (there is none: tamis config init makes one)"
    sys.stdout.write(f"{path}{state}\n")
    shown: dict[tuple[str, str, str], list[str]] = {}
    for row in found:
        key = row["flag"], str(row["value"]), row["origin"]
        shown.setdefault(key, []).append(row["command"])
    for (flag, value, origin), commands in shown.items():
        every = "" if len(commands) > 4 else f" ({', '.join(commands)})"
        sys.stdout.write(f"{flag} {value}{every}, from {origin}\n")
    for name, table in (data.get(settings.MODEL) or {}).items():
        if isinstance(table, dict):
            text = ", ".join(f"--{key} {value}" for key, value in table.items())
            sys.stdout.write(f"with -m {name}: {text}\n")


def parser_of(command: str) -> Parser:
    """The parser of a command, without settings."""
    parser = Parser(prog=f"tamis {command}", description=COMMANDS[command])
    importlib.import_module(module_of(command)).add_arguments(parser)
    return parser


def _found(command: str) -> list[tuple[str, settings.Setting]]:
    return [*settings.found(command, settings.named(parser_of(command)), None).items()]


def _check(data: dict[str, Any], path: Path) -> None:
    """Raise SettingsError for a key that no command has, or a value that its flag refuses."""
    parsers = {command: parser_of(command) for command in COMMANDS}
    every = {name for parser in parsers.values() for name in settings.named(parser)}
    for key, value in data.items():
        models = value if key == settings.MODEL and isinstance(value, dict) else {}
        if isinstance(value, dict) and key not in parsers and not models:
            close = did_you_mean(key, [*parsers, settings.MODEL])
            raise settings.SettingsError(f"{path}: there is no command [{key}]{close}")
        if not isinstance(value, dict) and key not in every:
            close = did_you_mean(key, every)
            raise settings.SettingsError(f"{path}: no command has a flag --{key}{close}")
        for name, table in models.items():
            for inner in table if isinstance(table, dict) else ():
                if inner not in every:
                    close = did_you_mean(inner, every)
                    raise settings.SettingsError(
                        f'{path} [model."{name}"]: there is no flag --{inner}{close}'
                    )
    tables = data.get(settings.MODEL)
    for model in [None, *(tables if isinstance(tables, dict) else ())]:
        for command, parser in parsers.items():
            settings.apply(parser, command, [] if model is None else ["-m", model], data)


def _change(path: Path, key: str, value: str | None) -> None:
    """Set or remove a key; the rest of the file is unchanged. Raises UsageError, SettingsError."""
    settings.read(path)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = key.split(".")
    head, name = parts[:-1], parts[-1]
    if head[:1] == [settings.MODEL] and len(parts) > 2:
        head = [settings.MODEL, ".".join(parts[1:-1])]
    elif len(head) > 1:
        raise UsageError(f"{key} is no key: write temp, run.temp or model.NAME.temp")
    new = edited(text, head, name, None if value is None else _literal(value))
    try:
        _check(tomllib.loads(new), path)
    except settings.SettingsError as error:
        # of the value given, not of a line that is in the file
        raise UsageError(re.sub(rf"^.*?--{re.escape(name)} is", f"{key} is", str(error))) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(path) as file:
        file.write(new.encode())
    note(f"{path}: {key} {'unset' if value is None else f'= {value}'}")


def _literal(value: str) -> str:
    """A value as TOML: unquoted if it is a number, a switch or a list, else a string."""
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return json.dumps(value, ensure_ascii=False)
    return value


def edited(text: str, head: list[str], name: str, literal: str | None) -> str:
    """TOML with a key of a table set or removed; all other lines are unchanged."""
    header = "" if not head else f"[{head[0]}]"
    if len(head) == 2:
        header = f"[{head[0]}.{json.dumps(head[1])}]"
    lines, table, at, end = text.splitlines(), "", -1, 0 if not head else -1
    for i, line in enumerate(lines):
        bare = line.split("#")[0].strip()
        if bare.startswith("["):
            table = bare
        if table == header:
            if bare.partition("=")[0].strip().strip("\"'") == name and "=" in bare:
                at = i
            if bare:
                end = i + 1
    if literal is None:
        if at < 0:
            raise UsageError(f"{'.'.join([*head, name])} is not set")
        del lines[at]
    elif at >= 0:
        lines[at] = f"{name} = {literal}"
    elif end >= 0:
        lines.insert(end, f"{name} = {literal}")
    else:
        lines += ["", header, f"{name} = {literal}"] if lines else [header, f"{name} = {literal}"]
    return "\n".join(lines).strip("\n") + "\n"
