"""Defaults of flags from a file and the environment; flags override variables, these the file.

The file is tamis/config.toml in $XDG_CONFIG_HOME or ~/.config, or the one that TAMIS_CONFIG names
("": none). A key is a flag's long name; keys of [run] hold for `tamis run`, keys of [model.NAME]
for the model that -m names so, with any command. A variable is TAMIS_ and the flag in capitals,
such as TAMIS_TOP_K.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tamis.cli.options import did_you_mean

MODEL = "model"  # the table that has a table for each model
Adds = Callable[[argparse.ArgumentParser], None]  # adds a command's flags
SECRETS = {"api-key", "api-key-file"}


class SettingsError(ValueError):
    """A setting that cannot be used; the message says where it is and what to do."""


class Setting(NamedTuple):
    """A value and its origin."""

    value: Any
    origin: str


def config_file() -> Path | None:
    """The path of the settings file, which may not exist; None if there is none."""
    own = os.environ.get("TAMIS_CONFIG")
    if own is not None:
        return Path(os.path.expanduser(own)) if own else None
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    root = Path(folder) if os.path.isabs(folder) else Path.home() / ".config"
    return root / "tamis" / "config.toml"


def read(path: Path | None) -> dict[str, Any]:
    """The settings of a file; empty if it does not exist. Raises SettingsError."""
    if path is None or not path.exists():
        return {}
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is no TOML: {error}; mend or remove it") from error


def apply(
    parser: argparse.ArgumentParser,
    command: str,
    words: Sequence[str],
    data: Mapping[str, Any] | None = None,
) -> None:
    """Set a command's defaults; lists that the command line sets are left out.

    data: replaces the file. Raises SettingsError for a value or a key that cannot be used.
    """
    put_defaults(parser, found(command, named(parser), model_of(words), data), words)


def put_defaults(
    parser: argparse.ArgumentParser, given: Mapping[str, Setting], words: Sequence[str]
) -> None:
    """Set defaults of a parser's flags by their long names; lists that words set are left out.

    Raises SettingsError for a value that cannot be used.
    """
    names = named(parser)
    for name, setting in given.items():
        action = names[name]
        is_given = any(w.partition("=")[0] in action.option_strings for w in words)
        if not (is_given and isinstance(action, argparse._AppendAction)):
            parser.set_defaults(**{action.dest: _value(parser, action, setting)})


def named(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """A parser's flags by their long names, without dashes, including those without a value."""
    return {
        name[2:]: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not isinstance(action, argparse._HelpAction)
    }


def found(
    command: str,
    names: Mapping[str, argparse.Action],
    model: str | None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Setting]:
    """The settings of a command by flag: variables before the file's tables for model, command.

    A flag has one setting, under whichever of its names.
    """
    path = config_file()
    data = read(path) if data is None else data
    model = model or os.environ.get("TAMIS_MODEL") or _text(data.get(command), MODEL)
    model = model or _text(data, MODEL)
    settings: dict[str, Setting] = {}
    by_action: dict[int, str] = {}

    def put(name: str, value: Any, origin: str) -> None:
        old = by_action.setdefault(id(names[name]), name)
        settings.pop(old, None)
        by_action[id(names[name])] = name
        settings[name] = Setting(value, origin)

    for title, table in _tables(data, command, model):
        for key, value in table.items():
            if key in names:
                put(key, value, f"{path}{title}")
            elif title == f" [{command}]":
                close = did_you_mean(key, names)
                raise SettingsError(f"{path} [{command}]: there is no flag --{key}{close}")
    for name in names:
        variable = "TAMIS_" + name.replace("-", "_").upper()
        # An empty variable counts as unset, except for keys: without a key a server admits
        # everyone.
        if os.environ.get(variable) or (name in SECRETS and variable in os.environ):
            put(name, os.environ[variable], variable)
    return settings


def model_of(words: Sequence[str]) -> str | None:
    """The model that -m names on a command line."""
    for i, word in enumerate(words):
        if word in ("-m", "--model") and i + 1 < len(words):
            return words[i + 1]
        for start in ("--model=", "-m"):
            if word.startswith(start) and word not in ("--model", "-m") and word[2:3] != "i":
                return word.removeprefix(start)
    return None


def _tables(
    data: Mapping[str, Any], command: str, model: str | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables that apply, the weakest first, each with its name for messages."""
    yield "", {k: v for k, v in data.items() if not isinstance(v, dict)}
    if isinstance(table := data.get(command), dict):
        yield f" [{command}]", table
    models = data.get(MODEL)
    if model is None or not isinstance(models, dict):
        return
    for name in (Path(model).stem, Path(model).name, model):
        if isinstance(table := models.get(name), dict):
            yield f' [{MODEL}."{name}"]', table
            return


def _text(data: Any, key: str) -> str | None:
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


def _value(parser: argparse.ArgumentParser, action: argparse.Action, setting: Setting) -> Any:
    """The value converted as the flag converts it. Raises SettingsError."""
    value, flag = setting.value, next(x for x in action.option_strings if x.startswith("--"))
    wrong = f"{setting.origin}: {flag} is {value!r}"
    if action.nargs == 0:  # a switch
        words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        value = words.get(str(value).lower(), value)
        if not isinstance(value, bool):
            raise SettingsError(f"{wrong}, expected true or false")
        return action.const if value else action.default
    values = value if isinstance(value, list) else [value]
    if not isinstance(action, argparse._AppendAction) and len(values) != 1:
        raise SettingsError(f"{wrong}, expected one value")
    try:
        checked = [parser._get_value(action, str(item)) for item in values]
        for item in checked:
            parser._check_value(action, item)
    except argparse.ArgumentError as error:
        raise SettingsError(f"{wrong}: {error.message}") from error
    return checked if isinstance(action, argparse._AppendAction) else checked[0]
