"""The flags of sampling and grammars: llama.cpp's names, order and defaults."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import say


class Flag(NamedTuple):
    """A sampler setting: its flags, its field of SamplerParams, type, default and help."""

    names: tuple[str, ...]
    field: str
    type: type
    default: float
    text: str


FLAGS = (
    Flag(("--temp",
         "--temperature"), "temp", float, 0.8,
         "temperature: divides the logits; 0: always take the most likely token"),
    Flag(("-s",
         "--seed"), "seed", int, -1,
         "seed of the random numbers: the same seed gives the same text; -1: a random one"),
    Flag(("--top-k",), "top_k", int, 40,
         "sample from the K most likely tokens only; 0: all"),
    Flag(("--top-p",), "top_p", float, 0.95,
         "sample from the most likely tokens whose probabilities add up to P; 1: all"),
    Flag(("--min-p",), "min_p", float, 0.05,
         "drop tokens less likely than P times the most likely one; 0: none"),
    Flag(("--typical-p",
         "--typical"), "typical_p", float, 1.0,
         "sample from the locally typical tokens with total probability P; 1: all"),
    Flag(("--top-n-sigma", "--top-nsigma"), "top_n_sigma", float, -1.0,
         "drop tokens whose logit is more than N standard deviations below the best; -1: none"),
    Flag(("--xtc-probability",), "xtc_probability", float, 0.0,
         "XTC: probability of leaving out the most likely tokens; 0: off"),
    Flag(("--xtc-threshold",), "xtc_threshold", float, 0.1,
         "XTC: leave out only tokens more likely than this, except the least likely of them"),
    Flag(("--min-keep",), "min_keep", int, 0,
         "least number of tokens that the filters above must leave"),
    Flag(("--repeat-last-n",), "repeat_last_n", int, 64,
         "number of last tokens that the penalties count, prompt included; 0: none, -1: all"),
    Flag(("--repeat-penalty",), "repeat_penalty", float, 1.0,
         "divide the logit of repeated tokens by this if positive, else multiply it; 1: off"),
    Flag(("--frequency-penalty",), "frequency_penalty", float, 0.0,
         "subtract this from a token's logit for each time it occurred; 0: off"),
    Flag(("--presence-penalty",), "presence_penalty", float, 0.0,
         "subtract this from a token's logit if it occurred; 0: off"),
    Flag(("--dry-multiplier",), "dry_multiplier", float, 0.0,
         "DRY: strength of the penalty on repeated sequences; 0: off, 0.8 is usual"),
    Flag(("--dry-base",), "dry_base", float, 1.75,
         "DRY: factor of the penalty for each token more in the repeated sequence"),
    Flag(("--dry-allowed-length",), "dry_allowed_length", int, 2,
         "DRY: longest repeated sequence, in tokens, without a penalty"),
    Flag(("--dry-penalty-last-n",), "dry_penalty_last_n", int, -1,
         "DRY: number of last tokens that are searched for repetitions; 0: none, -1: all"),
    Flag(("--dynatemp-range",), "dynatemp_range", float, 0.0,
         "vary the temperature by up to this much with the entropy; 0: off"),
    Flag(("--dynatemp-exp",), "dynatemp_exponent", float, 1.0,
         "exponent of the entropy in --dynatemp-range"),
    Flag(("--mirostat",), "mirostat", int, 0,
         "keep the surprise of tokens constant (Mirostat 1 or 2), in place of top-k and top-p; "
         "0: off"),
    Flag(("--mirostat-ent",), "mirostat_tau", float, 5.0,
         "Mirostat: target surprise in bits"),
    Flag(("--mirostat-lr",), "mirostat_eta", float, 0.1,
         "Mirostat: learning rate"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sampler's flags in their own group."""
    group = parser.add_argument_group(
        "sampling", "The samplers are applied in llama.cpp's order, with its names and defaults."
    )
    for flag in FLAGS:
        group.add_argument(
            *flag.names,
            dest=flag.field,
            type=common.number if flag.type is float else common.whole,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"{flag.text} (default: {flag.default:g})",
        )
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        type=common.text,
        metavar="TEXT",
        help="text at which DRY stops matching repeated sequences; may be repeated; none: no such "
        "text (default: line break, colon, quotation mark, asterisk)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="do not stop at the end-of-sequence token; the answer ends at -n tokens or at a "
        "--stop text",
    )
    group.add_argument(
        "-l",
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID+N",
        help="add N to the logit of token ID, or subtract with ID-N; may be repeated (default: "
        "none)",
    )


def add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that constrain an answer's form; only one may be given."""
    group = parser.add_argument_group(
        "form of the answer", "These flags need the extra `grammar` (pip install tamis[grammar])."
    )
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--grammar",
        metavar="GBNF",
        type=common.text,
        help="limit the answer to this GBNF grammar (default: none)",
    )
    one.add_argument(
        "--grammar-file",
        metavar="FILE",
        help="limit the answer to the GBNF grammar in this file (default: none)",
    )
    one.add_argument(
        "-j",
        "--json-schema",
        metavar="JSON",
        type=common.text,
        help="limit the answer to JSON that is valid under this JSON schema; {}: any JSON "
        "(default: none)",
    )
    one.add_argument(
        "-jf",
        "--json-schema-file",
        metavar="FILE",
        help="limit the answer to JSON that is valid under the JSON schema in this file (default: "
        "none)",
    )


def params(arguments: argparse.Namespace) -> Any:
    """The SamplerParams of the given flags. Raises UsageError."""
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
        name, _, rest = str(error).partition(" ")
        names = {flag.field: flag.names[0] for flag in FLAGS} | {
            "logit_bias": "--logit-bias",
            "dry_sequence_breakers": "--dry-sequence-breaker",
        }
        raise UsageError(f"{names.get(name, name)} {rest}") from error


def grammar(arguments: argparse.Namespace, engine: Any) -> Any:
    """The sampler's step of --grammar and its kin, None without them. Raises UsageError."""
    a = arguments
    schema, text = a.json_schema, a.grammar
    if a.json_schema_file is not None:
        schema = common.read_text(a.json_schema_file)
    if a.grammar_file is not None:
        text = common.read_text(a.grammar_file)
    if schema is None and text is None:
        return None
    from tamis.sampling.chain import SamplerError
    from tamis.sampling.grammar import Grammar, compile_gbnf, compile_schema, tried
    from tamis.sampling.vocabulary import GrammarTokenizer

    tokenizer = GrammarTokenizer(engine.tokenizer, engine.hp.n_vocab)
    try:
        if schema is None:
            found = tried(compile_gbnf(text, tokenizer))
        else:
            found = tried(compile_schema(json.loads(schema)))
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from error
    except SamplerError as error:
        raise UsageError(str(error)) from error
    if found.left_out:
        say(f"the answer's form does not enforce {', '.join(found.left_out)}")
    return Grammar(found.text, tokenizer)


def for_model(params: Any, arguments: argparse.Namespace, path: Path) -> Any:
    """The parameters with the temperature of a model if the user has set none.

    It is the recommendation of a known model's makers, or the default.
    """
    from tamis.fetch.registry import KNOWN

    if hasattr(arguments, "temp"):
        return params
    temp = next((model.temp for model in KNOWN.values() if model.file == path.name), None)
    return replace(params, temp=type(params)().temp if temp is None else temp)


def check(arguments: argparse.Namespace) -> None:
    """Raise the errors of a grammar's file before a model is loaded."""
    for path in (arguments.grammar_file, arguments.json_schema_file):
        if path is not None:
            Path(path).read_bytes()


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _bias(text: str) -> tuple[int, float]:
    """A token id and the bias of its logit: 42+1.5, 42-inf."""
    for sign in "+-":
        head, found, tail = text.partition(sign)
        if found and head.isdigit():
            try:
                return int(head), float(sign + tail)
            except ValueError:
                break
    raise argparse.ArgumentTypeError(f"{text!r} is no bias such as 42+1.5 or 42-inf")
