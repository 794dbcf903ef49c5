"""`tamis man`: the manual page of all commands, from their parsers."""

import argparse
import sys
from collections.abc import Iterator

from tamis.cli.commands import COMMANDS
from tamis.cli.commands.config import parser_of
from tamis.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.epilog = (
        "`tamis man | man -l -` shows it; `tamis man > ~/.local/share/man/man1/tamis.1` installs it"
    )


def run(_arguments: argparse.Namespace) -> int:
    """Print the page in roff."""
    sys.stdout.write("\n".join(page()) + "\n")
    return 0


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f'.TH TAMIS 1 "" "tamis {__version__}" "User Commands"'
    yield ".SH NAME\ntamis \\- run GGUF language models and read what matters of long contexts"
    yield ".SH SYNOPSIS\n.B tamis\n.I COMMAND\n.RI [ OPTION ]..."
    yield ".SH COMMANDS"
    for name, text in COMMANDS.items():
        yield f".TP\n.B {name}\n{_roff(text)}"
    for name in COMMANDS:
        yield f'.SH "TAMIS {name.upper()}"\n{_roff(COMMANDS[name])}'
        parser = parser_of(name)
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            if actions and group.title:
                yield f'.SS "{_roff(group.title)}"'
            for action in actions:
                yield from _described(parser, action)
    yield ".SH FILES\n.TP\n.I ~/.config/tamis/config.toml\nDefaults of flags: see tamis config."
    yield ".TP\n.I ~/.cache/tamis\nModels, compiled kernels and documents: see tamis cache."
    yield ".SH ENVIRONMENT\n.TP\n.B TAMIS_MODELS\nThe folder of models."
    yield ".TP\n.B TAMIS_TOP_K, ...\nThe default of a flag, here of --top-k."
    yield ".SH EXIT STATUS\n0, 1 (failed), 2 (wrong command line), 130 (interrupted)."


def _described(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    formatter = parser._get_formatter()
    value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    if action.option_strings:
        shown = [f"\\fB{_roff(n)}\\fR" for n in action.option_strings]
        yield f".TP\n{', '.join(shown)} \\fI{_roff(value)}\\fR"
    else:
        yield f".TP\n\\fI{_roff(action.metavar or action.dest)}\\fR"
    yield _roff(formatter._expand_help(action)) if action.help else ""


def _roff(text: object) -> str:
    """Text with everything escaped that roff would take for a command."""
    safe = str(text).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{safe}" if safe.startswith((".", "'")) else safe
