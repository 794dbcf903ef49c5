"""Parameters have one name in all methods; a paper's own name stays an alias."""

import re

import pytest

from tamis.select.base import COMMON
from tamis.select.notation import (
    MethodError,
    defaults_of,
    methods,
    needs_inner,
    parameters_of,
    parse_method,
)

ALIASES = [
    (name, common, field.name)
    for name, method in methods().items()
    for common, field in parameters_of(method).items()
    if common != field.name
]
# Names of papers for what COMMON has a name for: a method that uses one declares it an alias.
PAPERS = {"local", "window", "l_d", "dense", "k", "n_sink", "n_local", "r_m", "last_q"}


def parse(name, parameters):
    role = methods()[name].roles[0]
    return parse_method(f"{name}:{parameters}", role)


@pytest.mark.parametrize(("name", "common", "own"), ALIASES)
def test_a_common_name_and_the_papers_set_the_same_field(name, common, own):
    field = parameters_of(methods()[name])[common]
    value = defaults_of(methods()[name])[common] + 1
    less = value - 1 - field.default  # sinks and recent tokens, where the field leaves them out
    assert parse(name, f"{common}={value}") == parse(name, f"{own}={value - less}")
    with pytest.raises(MethodError, match=f"{common}=.*there before"):
        parse(name, f"{common}={value},{own}={value}")


def test_all_methods_use_the_common_names():
    for name, method in methods().items():
        for shown, field in parameters_of(method).items():
            assert shown not in PAPERS, f"{name} shows {shown}: give it a name of COMMON"
            assert field.metadata.get("common", "sink") in COMMON


def test_a_budget_counts_sinks_and_recent_tokens():
    given = parse_method("topk:budget=100,sink=8,recent=32")
    assert given == parse_method("topk:k=60,recent=32,sink=8")
    with pytest.raises(MethodError, match=r"budget=30 in .*: sinks and recent .* take 68"):
        parse_method("topk:budget=30")


def test_a_text_of_defaults_is_the_method_without_parameters():
    for name, method in methods().items():
        if needs_inner(method):
            continue
        values = ",".join(f"{key}={value}" for key, value in defaults_of(method).items())
        assert parse(name, values) == method()


def test_messages_have_both_names():
    with pytest.raises(
        MethodError, match=r"hip takes budget=\.\.\. \(k\), .*recent=\.\.\. \(local"
    ):
        parse_method("hip:keep=1")


def test_the_docs_table_has_both_names(root):
    text = (root / "docs/methods/index.md").read_text()
    names, papers = text.partition("## Parameters")[2].split("| method |")[:2]
    assert re.findall(r"^\| `(\w+)` \|", names, re.M) == list(COMMON)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", papers.partition("\n\n")[0], re.M)
    table = {(name, *pair) for name, text in rows for pair in re.findall(r"(\w+) `(\w+)`", text)}
    assert table == set(ALIASES)
