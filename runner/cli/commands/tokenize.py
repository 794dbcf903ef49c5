"""`tamis tokenize`: the token ids of a text."""

import argparse
import json
import sys

from tamis.cli.options import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("-m", "--model", help=f"path or short name of the model {common.DEFAULT}")
    parser.add_argument(
        "text", type=common.text, nargs="?", help="the text (default: read from standard input)"
    )
    parser.add_argument(
        "--special", action="store_true", help="parse special tokens that the text contains"
    )
    parser.add_argument(
        "--no-bos", action="store_true", help="do not add a beginning-of-sequence token"
    )
    parser.add_argument("--json", action="store_true", help="print ids and pieces as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one token per line: id and bytes."""
    from tamis.formats.gguf import GGUFFile
    from tamis.formats.vocab import Vocab
    from tamis.text.tokenizer import tokenizer_for

    text = arguments.text if arguments.text is not None else common.read_text("-")
    with GGUFFile(common.model_file(arguments.model, common.Progress())) as file:
        tokenizer = tokenizer_for(Vocab.from_gguf(file))
    ids = tokenizer.encode(text, add_special=not arguments.no_bos, parse_special=arguments.special)
    pieces = [tokenizer.piece(i, special=True).decode("utf-8", "backslashreplace") for i in ids]
    if arguments.json:
        rows = [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    for i, piece in zip(ids, pieces, strict=True):
        sys.stdout.write(f"{i:>8}  {piece!r}\n")
    return 0
