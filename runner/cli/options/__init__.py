"""Help in groups, defaults shown, "did you mean": an extension of argparse."""

import argparse
import difflib
import re
import shutil
from collections.abc import Iterable
from typing import Any, NoReturn

_CHOICE = re.compile(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)")
_NO_VALUE = re.compile(r"argument (\S+?)(/\S+)?: expected (one|at least one) argument")
FEW = 6  # flags that a usage line lists
LONG_START = 4  # letters; what begins with so long a name is meant to be it


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors that suggest the nearest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, **kwargs})
        self.command: argparse.ArgumentParser = self  # the subcommand whose flags the user may mean

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after an error of one line."""
        command = self.prog
        if message.startswith("unrecognized"):  # argparse lets the main parser report these
            command = self.command.prog
        self.exit(2, f"tamis: error: {self._meant(message)} (see {command} --help)\n")

    def _meant(self, message: str) -> str:
        if message.startswith("unrecognized arguments: "):
            words = message.partition(": ")[2].split()
            first = next((word for word in words if word.startswith("-")), "")
            return message + did_you_mean(first.partition("=")[0], flags(self.command))
        if found := _CHOICE.fullmatch(message):
            choices = re.findall(r"[\w.:-]+", found[3])
            close = did_you_mean(found[2], choices)
            if found[1] == "COMMAND":
                what = f"there is no command {found[2]!r}"
            else:
                what = f"{found[1]} takes no {found[2]!r}"
            return f"{what}{close or ': expected ' + ', '.join(choices)}"
        if found := _NO_VALUE.fullmatch(message):
            return self._without_value(found[1]) or message
        return message

    def _without_value(self, flag: str) -> str:
        """What to say of a flag without its value: its form and what it means."""
        action = self._option_string_actions.get(flag)
        if action is None or not action.help:
            return ""
        form = Help("")._format_action_invocation(action)
        return f"{form}: the value is missing; {_first_clause(action.help)}"


def _first_clause(text: str) -> str:
    """A help sentence up to its first border, without the signs of formatting."""
    return re.split(r"[;(:]|\. ", text)[0].replace("%%", "%").strip()


class Help(argparse.HelpFormatter):
    """Help of at most 100 columns, with the default of each flag."""

    def __init__(self, prog: str, **_: Any) -> None:
        width = min(shutil.get_terminal_size().columns, 100) - 2
        super().__init__(prog, max_help_position=26, width=width)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """A flag's help sentence, with the default unless it names one or the flag is required."""
        text, default = action.help, action.default
        stated = action.nargs == 0 or (text and re.search(r"default|\(required", text))
        if not text or not action.option_strings or stated:
            return text
        none = default in (None, argparse.SUPPRESS, "") or isinstance(default, list)
        return f"{text} (default: none)" if none else f"{text} (default: %(default)s)"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """The left column: all names of a flag, followed by its value once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, default)}"

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None,
    ) -> str:
        """The usage line; many flags become one word, as the groups list them."""
        actions = list(actions)
        if usage is None and sum(bool(a.option_strings) for a in actions) > FEW:
            words = [a for a in actions if not a.option_strings]
            found: str = super()._format_usage(None, words, [], prefix)
            return found.replace(self._prog, f"{self._prog} [OPTION]...", 1)
        return super()._format_usage(usage, actions, groups, prefix)


def group(parser: argparse.ArgumentParser, title: str, text: str | None = None) -> Any:
    """The parser's group of this title, made if there is none."""
    for found in parser._action_groups:
        if found.title == title:
            return found
    return parser.add_argument_group(title, text)


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """All names of a parser's visible flags."""
    return [
        name
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for name in action.option_strings
    ]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message with the word nearest to an unknown one; "" if none is near."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.6) if word else []
    if not close:  # temperature: temp
        close = [name for name in names if len(name) >= LONG_START and word.startswith(name)][:2]
    return f"; did you mean {' or '.join(close)}?" if close else ""
