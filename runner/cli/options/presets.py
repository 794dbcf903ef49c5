"""Presets of the models of a server: the INI file that llama-server's --models-preset takes.

A section is a model with flags of its own, without their dashes. Its name is that of an installed
model, or a new one with `model` or `hf-repo`. The flags of [*] are for all models. Keys may also
be llama-server's names of flags, its variables such as LLAMA_ARG_CTX_SIZE, and sampling fields.
"""

import argparse
import configparser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tamis.cli.options import Parser, did_you_mean, settings
from tamis.cli.options.errors import UsageError

EVERY = "*"  # the section of flags for all models
_TOP = "\n"  # stands for the lines before the first section; no section has this name
_VARIABLE = "LLAMA_ARG_"
# llama-server's names of what has another one here.
_RENAMED = {
    "np": "parallel", "ub": "ubatch", "ubatch-size": "ubatch", "m": "model",
    "spec-draft-model": "model-draft", "spec-draft-n-max": "draft-max", "chat-template-kwargs": "",
}  # fmt: skip
# Fields of requests, by the keys that set their defaults.
_FIELDS = {
    "temp": "temperature", "temperature": "temperature", "top-k": "top_k", "top-p": "top_p",
    "min-p": "min_p", "typical": "typical_p", "typical-p": "typical_p", "s": "seed", "seed": "seed",
    "n": "n_predict", "predict": "n_predict", "n-predict": "n_predict",
    "repeat-penalty": "repeat_penalty", "repeat-last-n": "repeat_last_n",
    "presence-penalty": "presence_penalty", "frequency-penalty": "frequency_penalty",
    "xtc-probability": "xtc_probability", "xtc-threshold": "xtc_threshold",
    "dry-multiplier": "dry_multiplier", "dry-base": "dry_base", "mirostat": "mirostat",
    "top-nsigma": "top_n_sigma", "reasoning-format": "reasoning_format",
}  # fmt: skip
# What the server does in any case, or has no use for.
_NO_EFFECT = {
    "version", "jinja", "flash-attn", "fa", "cont-batching", "cb", "stop-timeout", "kv-unified",
    "offline",
}  # fmt: skip
_REPOS = {"hf": "model", "hfr": "model", "hf-repo": "model"}
_REPOS |= {"hfd": "model-draft", "hfrd": "model-draft", "spec-draft-hf": "model-draft"}
_FILES = {"hff": "model", "hf-file": "model"}
_OF_ROUTER = {
    "host", "port", "api-key", "api-key-file", "api-prefix", "ssl-cert-file", "ssl-key-file",
    "models-max", "models-preset", "no-models-autoload", "models-autoload", "allow-host",
    "cors-origins", "memory", "metrics", "sleep-idle-seconds",
}  # fmt: skip
_SWITCHES = {"load-on-startup", "dedup-cache-models"}
_TRUE = {"1": True, "true": True, "on": True, "yes": True}
_WORDS = _TRUE | {"0": False, "false": False, "off": False, "no": False}


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's section, the flags of [*] included."""

    name: str
    flags: Mapping[str, settings.Setting]  # by their long names
    fields: tuple[str, ...] = ()  # NAME=VALUE of --set
    load: bool = False  # at the start of the server
    hides: bool = False  # leave the installed models that it is of out of lists

    @property
    def words(self) -> tuple[str, ...]:
        """The preset as a command line."""
        flags = (f"--{name}={setting.value}" for name, setting in self.flags.items())
        return (*flags, *(f"--set={each}" for each in self.fields))


@dataclass(slots=True)
class _Read:
    """What was read of a section so far."""

    flags: dict[str, settings.Setting] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    switches: dict[str, bool] = field(default_factory=dict)


class Presets:
    """The sections of a file."""

    def __init__(self, path: Path, names: Mapping[str, argparse.Action]) -> None:
        """Read a file; names: the flags of the server. Raises UsageError, OSError."""
        self._path, self._names = path, names
        self._sections = _sections(path)
        self._short: dict[str, str] = {}
        for long, action in names.items():
            for option in action.option_strings:
                self._short.setdefault(option.lstrip("-"), long)
        self.names = [name for name in self._sections if name != EVERY]
        for name in self.names:
            self.of(name)

    def of(self, name: str) -> Preset | None:
        """The preset of a model; None if no section is of it. Raises UsageError."""
        if name not in self._sections and EVERY not in self._sections:
            return None
        found = _Read()
        for section in (EVERY, name):
            for key, value in self._sections.get(section, {}).items():
                self._put(found, section, key, value)
        fields = tuple(f"{key}={value}" for key, value in found.fields.items())
        hides = found.switches.get("dedup-cache-models", False) and name in self._sections
        load = found.switches.get("load-on-startup", False)
        return Preset(name, found.flags, fields, load, hides)

    def _put(self, found: _Read, section: str, key: str, value: str) -> None:
        """Add a line of a section to what was read of it. Raises UsageError."""
        where = f"{self._path} [{section}]"
        word = key
        if key.startswith(_VARIABLE):
            word = key.removeprefix(_VARIABLE).lower().replace("_", "-")
        word = _RENAMED.get(word, word)
        if word in _SWITCHES:
            found.switches[word] = _switch(where, key, value)
        elif word in _OF_ROUTER:
            raise UsageError(f"{where}: {key} is of the whole server: give it as a flag")
        elif word in _REPOS:
            setting = settings.Setting(f"hf:{value.removeprefix('hf:')}", where)
            found.flags[_REPOS[word]] = setting
        elif word in _FILES:
            self._put_file(found, where, _FILES[word], value)
        elif word in self._short:
            found.flags[self._short[word]] = settings.Setting(value, where)
        elif word in _FIELDS:
            found.fields[_FIELDS[word]] = value
        elif word not in _NO_EFFECT:
            known = [*self._short, *_FIELDS, *_SWITCHES, *_REPOS]
            raise UsageError(f"{where}: there is no flag --{word}{did_you_mean(word, known)}")

    def _put_file(self, found: _Read, where: str, name: str, value: str) -> None:
        """Name a file of the repository that the lines before named. Raises UsageError."""
        repo = str(found.flags[name].value) if name in found.flags else ""
        if not repo.startswith("hf:"):
            raise UsageError(f"{where}: hf-file is {value!r}, expected hf-repo before it")
        head = repo.removeprefix("hf:").partition(":")[0]
        found.flags[name] = settings.Setting(f"hf:{head}/{value}", where)


def _sections(path: Path) -> dict[str, dict[str, str]]:
    """The lines of a file by section. Raises UsageError, OSError."""
    parser = configparser.ConfigParser(
        default_section=_TOP,
        interpolation=None,
        delimiters=("=",),
        comment_prefixes=(";", "#"),
        inline_comment_prefixes=(";", "#"),
    )
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    try:
        text = path.read_text(encoding="utf-8")
        head, sign, rest = text.partition("\n[") if not text.startswith("[") else ("", "", text)
        top = [line for line in head.splitlines() if line.strip() and line.strip()[0] not in ";#"]
        unknown = [line for line in top if line.partition("=")[0].strip() != "version"]
        if unknown:
            raise UsageError(f"{path}: {unknown[0]!r} is in no section: put it below [*] or a name")
        parser.read_string("[" + rest if sign else rest)
    except (configparser.Error, UnicodeDecodeError) as error:
        why = str(error).replace("\n", " ")
        raise UsageError(f"{path} is no INI file: {why}") from error
    return {name: dict(parser[name]) for name in parser.sections()}


def _switch(where: str, key: str, value: str) -> bool:
    """The value of a switch. Raises UsageError."""
    if (found := _WORDS.get(value.lower())) is None:
        raise UsageError(f"{where}: {key} is {value!r}, expected true or false")
    return found


class _Strict(Parser):
    """A parser whose errors are raised; they name no command line, which is not at fault."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message)


def arguments_of(
    add_arguments: "settings.Adds", words: Sequence[str], preset: Preset
) -> argparse.Namespace:
    """The arguments of a command with a preset's flags below its own words.

    Raises UsageError, SettingsError.
    """
    parser = _Strict()
    parser.add_argument("--traceback", action="store_true")
    add_arguments(parser)
    named = ["-m", str(preset.flags["model"].value)] if "model" in preset.flags else []
    settings.apply(parser, "serve", [*named, *words])
    settings.put_defaults(parser, preset.flags, words)
    given = [word for each in preset.fields for word in ("--set", each)]
    return parser.parse_args([*given, *words])
