"""`tamis tokenize`: the token ids of a text."""

import argparse
import json
import sys

from tamis.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.add_argument("-m", "--model", help="path or short name of a model (default: smollm2)")
    parser.add_argument("text", nargs="?", help="the text (default: standard input)")
    parser.add_argument("--special", action="store_true", help="parse special tokens in the text")
    parser.add_argument("--no-bos", action="store_true", help="add no BOS")
    parser.add_argument("--json", action="store_true", help="the ids as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one token a line: id and bytes."""
    from tamis.formats.gguf import GGUFFile
    from tamis.formats.vocab import Vocab
    from tamis.tokenizer import tokenizer_for

    text = arguments.text if arguments.text is not None else common.read_text("-")
    with GGUFFile(common.model_file(arguments.model, common.Progress())) as file:
        tokenizer = tokenizer_for(Vocab.from_gguf(file))
    ids = tokenizer.encode(text, add_special=not arguments.no_bos, parse_special=arguments.special)
    if arguments.json:
        sys.stdout.write(json.dumps(ids) + "\n")
        return 0
    for token in ids:
        piece = tokenizer.piece(token, special=True)
        sys.stdout.write(f"{token:>8}  {piece.decode('utf-8', 'backslashreplace')!r}\n")
    return 0
