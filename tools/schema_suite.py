"""JSON Schema's own test suite, run on the grammars made of schemas.

`python -m tamis.tools.schema_suite FOLDER` reads the test files (*.json) of FOLDER, a draft of the
suite (`json/tests/draft2020-12` in jsonschema's source distribution), and prints a table: schemas
accepted, refused and enforced in part; instances that the grammar decides like the suite; random
texts of the grammar that `jsonschema` accepts as instances. It lists every refusal, every keyword
left out, every instance that a grammar wrongly refuses, and every error; the status is 1 if there
is an error: an instance wrongly accepted, or a text that is not an instance. `format.json`, in
which formats are annotations, is left out: here they are enforced.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from tamis.grammar.errors import GrammarError
from tamis.grammar.probe import byte_vocabulary, llguidance
from tamis.grammar.schema.compiled import compiled_schema

_SPACE = r"[ \n\t]{0,2}"
_MOST_ORDERS, _MOST_BYTES, _N_TEXTS = 24, 400, 6
_END = 256  # the token that ends a text, after those of the bytes


@dataclass
class Outcome:
    """Counts of one test file, and lines about differences from the suite."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def _fits(matcher: Any, text: str) -> bool:
    copy, data = matcher.deep_copy(), list(text.encode())
    return bool(copy.try_consume_tokens(data) == len(data) and copy.is_accepting())


def _orders(value: Any) -> Iterator[Any]:
    """Yield the value with the members of its objects in other orders, and 1.0 as 1."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for items in itertools.product(*(list(_orders(value[k])) for k in keys)):
                yield dict(zip(keys, items, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(_orders(item)) for item in value)))
    else:
        yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)


def _is_accepted(matcher: Any, value: Any) -> bool:
    orders = itertools.islice(_orders(value), _MOST_ORDERS)
    return any(_fits(matcher, json.dumps(order, ensure_ascii=False)) for order in orders)


def _random_text(matcher: Any, seed: int) -> str | None:
    """A text of random allowed bytes; None if it has not ended in time."""
    rng, copy, data = random.Random(seed), matcher.deep_copy(), bytearray()
    for n in range(_MOST_BYTES):
        mask = copy.compute_bitmask()
        allowed = [b for b in range(257) if mask[b // 8] >> (b % 8) & 1]
        if _END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return data.decode()
        allowed = [b for b in allowed if b < _END and b not in b" \n\t"] or allowed
        ends = [b for b in allowed if b in b'"]}']
        byte = rng.choice(ends if ends and rng.random() < (0.3 if n < 80 else 0.8) else allowed)
        copy.consume_token(byte)
        data.append(byte)
    return None


def _is_instance(schema: Any, text: str) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return bool(validator.is_valid(json.loads(text)))


def run_case(case: dict[str, Any], name: str, out: Outcome) -> None:
    """Add the results of one schema and its instances to ``out``."""
    schema, what = case["schema"], f"{name}: {case['description']}"
    out.counts["schemas"] += 1
    try:
        found = compiled_schema(schema, _SPACE, close=False)
    except GrammarError as error:
        if not any(test["valid"] for test in case["tests"]):
            out.counts["satisfied by nothing"] += 1
        else:
            out.counts["refused"] += 1
            out.refused.append(f"{what}: {str(error)[:160]}")
        return
    matcher = llguidance().LLMatcher(byte_vocabulary(), found.text, log_level=0)
    if matcher.is_error():
        out.wrong.append(f"{what}: {matcher.get_error()[:160]}")
        return
    if found.left_out:
        out.counts["in part"] += 1
        out.partial.append(f"{what}: without {', '.join(found.left_out)}")
    for test in case["tests"]:
        out.counts["instances"] += 1
        accepted = _is_accepted(matcher, test["data"])
        if accepted == test["valid"]:
            out.counts["as the suite"] += 1
        elif test["valid"] or not found.left_out:
            (out.narrow if test["valid"] else out.wrong).append(
                f"{what}: {json.dumps(test['data'])[:80]} accepted: {accepted}"
            )
    for text in filter(None, (_random_text(matcher, seed) for seed in range(_N_TEXTS))):
        with contextlib.suppress(Exception):  # references that jsonschema would have to fetch
            out.counts["texts"] += 1
            if _is_instance(schema, text):
                out.counts["instances of the schema"] += 1
            elif not found.left_out:
                out.wrong.append(f"{what}: made {text[:80]}")


COLUMNS = (
    "schemas",
    "refused",
    "satisfied by nothing",
    "in part",
    "instances",
    "as the suite",
    "texts",
    "instances of the schema",
)


def main() -> None:
    """Print the table of a folder of test files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files with this in their name")
    given = parser.parse_args()
    total, files = Outcome(), sorted(given.folder.glob("*.json"))
    files = [path for path in files if path.stem != "format"]
    print("| file | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|")
    for path in (path for path in files if given.only in path.stem):
        out = Outcome()
        for case in json.loads(path.read_text()):
            run_case(case, path.stem, out)
        print(f"| {path.stem} | " + " | ".join(str(out.counts[c]) for c in COLUMNS) + " |")
        sys.stdout.flush()
        total.counts += out.counts
        for name in ("refused", "partial", "narrow", "wrong"):
            getattr(total, name).extend(getattr(out, name))
    print("| all | " + " | ".join(str(total.counts[c]) for c in COLUMNS) + " |")
    for name in ("refused", "partial", "narrow", "wrong"):
        print("\n".join(["", f"{name}: {len(getattr(total, name))}", *getattr(total, name)]))
    sys.exit(1 if total.wrong else 0)


if __name__ == "__main__":
    main()
