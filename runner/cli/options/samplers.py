"""The sampler's and the grammar's flags: llama.cpp's names, order and defaults."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from tamis.cli.options import common
from tamis.cli.options.errors import UsageError


class Flag(NamedTuple):
    """A sampler setting: its flags, its field of SamplerParams, type, default and sentence."""

    names: tuple[str, ...]
    field: str
    type: type
    default: float
    text: str


FLAGS = (
    Flag(("--temp", "--temperature"), "temp", float, 0.8, "randomness; 0: the likeliest token"),
    Flag(("-s", "--seed"), "seed", int, -1, "repeats a text; -1 draws one"),
    Flag(("--top-k",), "top_k", int, 40, "only the k likeliest tokens; 0: all"),
    Flag(("--top-p",), "top_p", float, 0.95, "only the likeliest with so much probability; 1: all"),
    Flag(("--min-p",), "min_p", float, 0.05, "only those with so much of the likeliest's; 0: all"),
    Flag(("--typical-p", "--typical"), "typical_p", float, 1.0, "locally typical tokens; 1: all"),
    Flag(("--top-n-sigma", "--top-nsigma"), "top_n_sigma", float, -1.0,
         "only logits within so many standard deviations of the best; -1: all"),
    Flag(("--xtc-probability",), "xtc_probability", float, 0.0,
         "how often the likeliest tokens are left out"),
    Flag(("--xtc-threshold",), "xtc_threshold", float, 0.1, "... that are likelier than this"),
    Flag(("--min-keep",), "min_keep", int, 0, "tokens that the steps above leave at least"),
    Flag(("--repeat-last-n",), "repeat_last_n", int, 64, "tokens that penalties look at; -1: all"),
    Flag(("--repeat-penalty",), "repeat_penalty", float, 1.0, "against repeated tokens; 1: none"),
    Flag(("--frequency-penalty",), "frequency_penalty", float, 0.0, "... by how often they came"),
    Flag(("--presence-penalty",), "presence_penalty", float, 0.0, "... once they have come"),
    Flag(("--dry-multiplier",), "dry_multiplier", float, 0.0,
         "against repeated sequences (DRY); 0: none, 0.8 is usual"),
    Flag(("--dry-base",), "dry_base", float, 1.75, "... growing by this with their length"),
    Flag(("--dry-allowed-length",), "dry_allowed_length", int, 2, "... above this length"),
    Flag(("--dry-penalty-last-n",), "dry_penalty_last_n", int, -1, "... in so many; -1: all"),
    Flag(("--dynatemp-range",), "dynatemp_range", float, 0.0,
         "temperature varies by so much with the entropy"),
    Flag(("--dynatemp-exp",), "dynatemp_exponent", float, 1.0, "... by this power of it"),
    Flag(("--mirostat",), "mirostat", int, 0, "keep the surprise constant: version 1 or 2; 0: off"),
    Flag(("--mirostat-ent",), "mirostat_tau", float, 5.0, "... at so many bits"),
    Flag(("--mirostat-lr",), "mirostat_eta", float, 0.1, "... with this learning rate"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampler's flags, in a group of their own."""
    group = parser.add_argument_group("sampling", "llama.cpp's names, order and defaults.")
    for flag in FLAGS:
        group.add_argument(
            *flag.names,
            dest=flag.field,
            type=flag.type,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"{flag.text} (default: {flag.default:g})",
        )
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        type=common.text,
        metavar="TEXT",
        help=r"text that ends a sequence for DRY, none: nothing does; may be given again "
        r"(default: line break, colon, quotation mark, star)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="never end the answer (default: the model may)"
    )
    group.add_argument(
        "-l",
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID+N",
        help="add N to the logit of a token id, or ID-N; may be given again (default: none)",
    )


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """What limits an answer's form; one of them."""
    group = parser.add_argument_group("form of the answer", "They need the extra grammar.")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--grammar", metavar="GBNF", type=common.text, help="a grammar, in GBNF")
    one.add_argument("--grammar-file", metavar="FILE", help="a file with one")
    one.add_argument(
        "-j", "--json-schema", metavar="JSON", type=common.text, help="JSON of this schema; {}: any"
    )
    one.add_argument("-jf", "--json-schema-file", metavar="FILE", help="a file with a schema")


def params(arguments: argparse.Namespace) -> Any:
    """SamplerParams of the flags that were given. Raises UsageError."""
    from tamis.sampling.chain import SamplerError, SamplerParams

    fields = [flag.field for flag in FLAGS]
    given = {name: getattr(arguments, name) for name in fields if hasattr(arguments, name)}
    if arguments.ignore_eos:
        given["ignore_eos"] = True
    if arguments.logit_bias:
        given["logit_bias"] = dict(arguments.logit_bias)
    if (breakers := arguments.dry_sequence_breaker) is not None:
        none = breakers == ["none"]
        given["dry_sequence_breakers"] = () if none else tuple(map(_unescaped, breakers))
    try:
        return SamplerParams(**given)
    except SamplerError as error:
        raise UsageError(str(error)) from error


def grammar(arguments: argparse.Namespace, engine: Any) -> Any:
    """The sampler's step of --grammar and the like, None where there is none. Raises UsageError."""
    a = arguments
    schema, text = a.json_schema, a.grammar
    if a.json_schema_file is not None:
        schema = common.read_text(a.json_schema_file)
    if a.grammar_file is not None:
        text = common.read_text(a.grammar_file)
    if schema is None and text is None:
        return None
    from tamis.sampling.chain import SamplerError
    from tamis.sampling.grammar import Grammar, GrammarTokenizer, gbnf_grammar, json_grammar

    try:
        compiled = gbnf_grammar(text) if schema is None else json_grammar(json.loads(schema))
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from error
    except SamplerError as error:
        raise UsageError(str(error)) from error
    return Grammar(compiled, GrammarTokenizer(engine.tokenizer, engine.hp.n_vocab))


def check(arguments: argparse.Namespace) -> None:
    """Raise what a file of a grammar would, before a model is loaded for it."""
    for path in (arguments.grammar_file, arguments.json_schema_file):
        if path is not None:
            Path(path).read_bytes()


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit: 42+1.5, 42-inf."""
    for sign in "+-":
        head, found, tail = text.partition(sign)
        if found and head.isdigit():
            try:
                return int(head), float(sign + tail)
            except ValueError:
                break
    raise argparse.ArgumentTypeError(f"{text!r} is no bias such as 42+1.5 or 42-inf")
