"""`tamis edit`: a copy of a model with other metadata; its tensors stay as they are."""

import argparse
import sys
from pathlib import Path

from tamis.cli.commands.list import size
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("model", metavar="IN", help="path or short name of the model")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; must not exist")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=TYPE:VALUE",
        help="set a key, such as general.name=str:Mine or tokenizer.ggml.eos_token_id=u32:2; TYPE "
        "is u8 to u64, i8 to i64, f32, f64, bool or str, in brackets for a JSON list: "
        "[i32]:[1,2] (repeatable)",
    )
    parser.add_argument(
        "--set-file",
        action="append",
        default=[],
        metavar="KEY=FILE",
        help="set a key to the text of a file, such as tokenizer.chat_template=chat.jinja "
        "(repeatable)",
    )
    parser.add_argument(
        "--remove", action="append", default=[], metavar="KEY", help="remove a key (repeatable)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the copy and print its name and size. Raises UsageError, FileExistsError, OSError."""
    from tamis.fetch.registry import resolve
    from tamis.formats.gguf import GGUFFile
    from tamis.make.copies import changed, edited

    sets = dict(map(_set, arguments.set)) | dict(map(_set_file, arguments.set_file))
    if not sets and not arguments.remove:
        raise UsageError("nothing to change: give --set, --set-file or --remove")
    progress = Progress()
    with GGUFFile(resolve(arguments.model)) as file:
        try:
            keys = changed(file, sets, arguments.remove)
        except ValueError as error:
            raise UsageError(str(error)) from None
        edited(file, arguments.out, keys, progress.of("write"))
    progress.clear()
    sys.stdout.write(f"{arguments.out}  {size(arguments.out.stat().st_size)}\n")
    return 0


def _set(text: str) -> tuple[str, bytes]:
    """A key and its record from KEY=TYPE:VALUE. Raises UsageError."""
    from tamis.formats.gguf_writer import record

    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and equals and colon):
        raise UsageError(f"--set {text!r}: expected KEY=TYPE:VALUE, such as general.name=str:Mine")
    try:
        return key, record(kind, value)
    except ValueError as error:
        raise UsageError(f"--set {key}: {error}") from None


def _set_file(text: str) -> tuple[str, bytes]:
    """A key and the record of a file's text from KEY=FILE. Raises UsageError."""
    from tamis.formats.gguf_writer import record

    key, equals, path = text.partition("=")
    if not (key and equals and path):
        raise UsageError(f"--set-file {text!r}: expected KEY=FILE")
    try:
        return key, record("str", Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"--set-file {key}: {path} is not UTF-8: convert it first") from None
    except OSError as error:
        raise UsageError(f"--set-file {key}: {path}: {error.strerror}") from None
