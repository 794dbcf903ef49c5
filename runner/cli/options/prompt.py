"""The prompt of `tamis run`: an instruction of the command line, a text of a file or a pipe."""

import argparse
import io
import os
import stat
import sys
from pathlib import Path
from typing import Any

from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import say

SHORT = 1 << 14  # in bytes; the tokens of a longer text are counted before the model is loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt's flags in their own group."""
    group = parser.add_argument_group(
        "prompt",
        "If both a text (-f or standard input) and an instruction (PROMPT or -p) are given, the "
        "prompt is the text, an empty line and the instruction.",
    )
    group.add_argument(
        "words",
        nargs="*",
        type=common.text,
        metavar="PROMPT",
        help="the prompt, or the instruction that follows the text of -f or of standard input",
    )
    group.add_argument(
        "-p",
        "--prompt",
        type=common.text,
        help="the same as PROMPT, as a flag; -: read it from standard input",
    )
    group.add_argument(
        "-f",
        "--file",
        help="file with the text that the instruction is about, UTF-8; -: standard input",
    )
    group.add_argument(
        "-sys",
        "--system",
        "--system-prompt",
        type=common.text,
        help="system message (default: none, or the chat template's own)",
    )
    group.add_argument(
        "--raw",
        action="store_true",
        help="apply no chat template: the model continues the text. This is always so for a model "
        "without a chat template",
    )


def read(arguments: argparse.Namespace) -> str:
    """Text and instruction, joined. Raises UsageError if there is neither, OSError, ValueError.

    The instruction comes last, as small models follow it best after a long text. Line breaks at the
    end of a file or of standard input are removed.
    """
    instruction = " ".join(arguments.words)
    if instruction and arguments.prompt is not None:
        raise UsageError("the prompt is given twice: leave out -p, or the words without a flag")
    given = arguments.prompt if arguments.prompt is not None else instruction
    instruction, parts = given if given != "-" else "", list[str]()
    if given == "-" and arguments.file == "-":
        raise UsageError("-p - and -f - both read standard input: leave out one")
    if given == "-":
        parts.append(_ended(common.read_text("-")))
    if arguments.file is not None:
        parts.append(_ended(common.read_text(arguments.file)))
    elif not instruction and given != "-" and arguments.prompt is None:
        if sys.stdin.isatty():
            raise UsageError("no prompt: give PROMPT, -f FILE, or pipe text in")
        parts.append(_ended(common.read_text("-")))
    elif instruction and _piped():
        parts.append(_ended(common.read_text("-")))
    text = "\n\n".join(filter(None, [*parts, instruction]))
    if not text:
        raise UsageError("the prompt is empty: give PROMPT, -f FILE, or pipe text in")
    return text


def _ended(text: str) -> str:
    return text.rstrip("\r\n")


def _piped() -> bool:
    """Whether standard input is a pipe or a file with the text for an instruction.

    A terminal, /dev/null and other devices are not read.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """The conversation of one prompt."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def encode(engine: Any, text: str, arguments: argparse.Namespace) -> list[int]:
    """Token ids of the prompt, in the form that the model was trained on. Raises UsageError.

    A model without a chat template completes the text; a note says so.
    """
    if completes(engine, arguments):
        ids: list[int] = engine.encode_marked(text)
    else:
        ids = engine.encode_chat(messages(text, arguments.system))
    return ids


def completes(engine: Any, arguments: argparse.Namespace) -> bool:
    """Whether the text is completed rather than answered. Raises UsageError."""
    if arguments.raw:
        return True
    if engine.vocab.chat_template is not None:
        return False
    name = engine.path.name
    if arguments.system is not None:
        raise UsageError(f"{name} has no chat template, so no system message: leave out --system")
    say(f"{name} has no chat template (a base model): it continues the text")
    return True


def count(path: Path, text: str) -> tuple[int, int]:
    """Tokens of a text and of the model's training context, from the file's header alone.

    (0, 0) for a text so short that counting its tokens later costs nothing.
    """
    if len(text.encode()) < SHORT:
        return 0, 0
    from tamis.formats.gguf import GGUFFile
    from tamis.formats.vocab import Vocab
    from tamis.text.tokenizer import tokenizer_for

    with GGUFFile(path) as file:
        tokenizer = tokenizer_for(Vocab.from_gguf(file))
        name = file.metadata.get("general.architecture", "")
        n_train = file.metadata.get(f"{name}.context_length", 0)
    return len(tokenizer.encode(text)), int(n_train)
