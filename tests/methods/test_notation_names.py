"""Parameters have one name in all methods, a paper's own name stays an alias; their defaults."""

import dataclasses
import re
from dataclasses import MISSING, fields

import numpy as np
import pytest

from tamis.select.base import COMMON, PREFILL
from tamis.select.notation import (
    MethodError,
    defaults_of,
    method_of,
    methods,
    names,
    needs_inner,
    parameters_of,
    parse_method,
)
from tamis.select.window import Window

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
    with pytest.raises(MethodError, match="budget is 30, expected at least 68, which sinks"):
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


# The papers' numbers, which users rely on: changed here and in the change log, or not at all.
DEFAULTS = {
    "auto": {"mass": 0.95, "least": 12288, "part": 16, "samples": 128, "seed": 0},
    "beyond": {"least": 8192},
    "bigbird": {"block": 64, "sink": 128, "recent": 192, "random": 192, "seed": 0},
    "cpe": {
        "s": 16,
        "tau": 0.8,
        "join": 0.8,
        "r": 1,
        "k": 432,
        "sink": 16,
        "local": 64,
        "phi": 0.7,
        "alpha": 1.0,
        "psi": 0.5,
        "gamma": 1.0,
        "kv": "project",
        "rows": "union",
    },
    "delta": {"gamma": 64, "mode": "delta"},
    "dense": {},
    "double_p": {
        "p1": 0.95,
        "p2": 0.7,
        "c": 16,
        "n_iter": 10,
        "period": 1024,
        "sink": 4,
        "local": 64,
        "segment": 8192,
        "seed": 0,
    },
    "double_sparsity": {
        "budget": 1024,
        "label": 0.25,
        "s": 32,
        "sink": 4,
        "recent": 64,
        "rows": "group",
    },
    "h2o": {"budget": 1024, "recent": 0.5, "sink": 4, "s": 128, "rows": "group"},
    "hip": {
        "k": 1024,
        "b_k": 2,
        "b_sk": 1,
        "b_q": 64,
        "b_sq": 8,
        "r_m": 1,
        "l_d": 3,
        "sink": 16,
        "local": 256,
        "span": 0,
        "rows": "group",
        "rep": "mean",
    },
    "hshare": {
        "budget": 1024,
        "layers": 0.75,
        "heads": 0.75,
        "period": 2,
        "sink": 16,
        "recent": 64,
        "rows": "head",
    },
    "hyperattention": {
        "block": 256,
        "sample": 256,
        "recent": 512,
        "bits": 7,
        "size": 32,
        "sink": 4,
        "l_d": 0,
        "seed": 0,
    },
    "lfps": {
        "a": 0.2,
        "r": 0.95,
        "s": 32,
        "budget": 0.02,
        "epsilon": 0.85,
        "sink": 4,
        "local": 64,
        "bypass": "mix",
        "rows": "group",
        "renew": 8,
    },
    "magicpig": {"K": 10, "L": 150, "dense": 1, "sink": 4, "recent": 64, "period": 2048, "seed": 0},
    "metered": {"mass": 0.95, "samples": 128, "even": 0.3, "seed": 0},
    "quest": {"budget": 1024, "page": 16, "dense": 2, "sink": 4, "recent": 16, "rows": "head"},
    "retroinfer": {
        "retrieve": 0.018,
        "estimate": 0.232,
        "c": 16,
        "n_iter": 10,
        "period": 1024,
        "sink": 4,
        "local": 64,
        "segment": 8192,
        "seed": 0,
    },
    "snapkv": {
        "budget": 1024,
        "window": 32,
        "kernel": 7,
        "pool": "max",
        "ada": 0.0,
        "beta": 1.0,
        "sink": 4,
        "rows": "group",
    },
    "tactic": {
        "P": 0.9,
        "c": 32,
        "n_iter": 10,
        "first": 0.02,
        "period": 2048,
        "sink": 4,
        "local": 256,
        "segment": 8192,
        "sample": 0,
        "margin": 0.5,
        "outside": "counted",
        "rows": "group",
        "reach": 0.7,
        "seed": 0,
    },
    "tail": {
        "epsilon": 0.1,
        "delta": 0.1,
        "bound": "output",
        "samples": 128,
        "even": 1.0,
        "most": 0.5,
        "seed": 0,
    },
    "topk": {"k": 512, "sink": 4, "recent": 64, "rows": "group"},
    "twilight": {"p": 0.95},
    "vertical_slash": {
        "n_vertical": 1000,
        "n_slash": 200,
        "last_q": 16,
        "sink": 30,
        "local": 100,
        "l_d": 0,
        "inner": None,
    },
    "window": {"sink": 4, "recent": 1024, "block": 16},
}
# Decode steps only, prompts only, or both.
ROLES = {
    "auto": ("decode",),
    "beyond": ("prefill",),
    "bigbird": ("decode", "prefill"),
    "cpe": ("decode", "prefill"),
    "delta": ("prefill",),
    "dense": ("decode", "prefill"),
    "double_p": ("decode",),
    "double_sparsity": ("decode",),
    "h2o": ("decode",),
    "hip": ("decode", "prefill"),
    "hshare": ("decode",),
    "hyperattention": ("prefill",),
    "lfps": ("decode",),
    "magicpig": ("decode",),
    "metered": ("decode",),
    "quest": ("decode",),
    "retroinfer": ("decode",),
    "snapkv": ("decode",),
    "tactic": ("decode",),
    "tail": ("decode",),
    "topk": ("decode",),
    "twilight": ("decode",),
    "vertical_slash": ("prefill",),
    "window": ("decode", "prefill"),
}


def test_every_method_is_listed():
    assert sorted(DEFAULTS) == names()


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_methods_parameters_have_these_defaults(name):
    found = {f.name: f.default for f in fields(method_of(name)) if f.default is not MISSING}
    assert found == DEFAULTS[name]


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_method_serves_these_roles(name):
    assert method_of(name).roles == ROLES[name]


@pytest.mark.parametrize("name", sorted(set(DEFAULTS) - {"dense"}))
def test_a_method_is_a_value_that_nobody_changes(name):
    """Sessions share methods, and equal ones share a state: all have a hash."""
    method = method_of(name)
    given = {} if "inner" not in {f.name for f in fields(method)} else {"inner": Window()}
    if name == "vertical_slash":
        given = {}
    one, other = method(**given), method(**given)
    assert one == other
    assert hash(one) == hash(other)
    for parameter in DEFAULTS[name]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, parameter, 1)
    assert hasattr(one, "__dict__") == (name == "auto")  # which reads defaults off its class


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tactic:P=3", "P is 3.0, expected 0 < P <= 1"),
        ("tactic:recent=-1", "recent is -1, expected recent >= 1"),
        ("tactic:local=-1", "local is -1, expected local >= 1"),
        ("hip:b_k=3,b_sk=9", "b_sk is 9, b_k is 3, budget is 1024, expected 1 <= b_sk <= b_k <="),
        ("tactic:segment=77", "segment is 77, c is 32, expected segment a multiple of c"),
        ("lfps:bypass=z", "bypass is 'z', expected none, mix or mean"),
        ("quest:rows=row", "rows is 'row', expected group or head"),
    ],
)
def test_a_parameter_out_of_range_is_reported_in_the_users_words(text, told):
    with pytest.raises(MethodError, match=f"^'{text}': {told}"):
        parse_method(text)


@pytest.mark.parametrize(
    ("key", "value", "told"), [("recent", "x", "a whole number"), ("P", "1o", "a number")]
)
def test_a_parameter_that_is_no_number_is_refused(key, value, told):
    with pytest.raises(MethodError, match=f"^{key}='{value}' in 'tactic:.*': expected {told}$"):
        parse_method(f"tactic:{key}={value}")


@pytest.mark.parametrize("name", methods())
def test_every_whole_number_but_a_seed_has_a_least_value(name):
    method = methods()[name]
    inner = f"{name}(window)" if needs_inner(method) else name
    for field in dataclasses.fields(method):
        if field.type is int and field.name != "seed":
            with pytest.raises(MethodError, match=f"{field.name} is -5, "):
                parse_method(f"{inner}:{field.name}=-5", method.roles[0])


OWN = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.select.base import DECODE, SelectorState


def newest(q, k):
    return np.arange(max(0, len(k) - 32), len(k))


@dataclass(frozen=True)
class Newest:
    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    recent: int = 32

    def open(self, shape):
        return SelectorState(shape)


number = 5
"""


def test_a_method_of_a_file_is_named_by_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    assert parse_method("own.py:Newest") == parse_method(f"{tmp_path}/own.py:Newest:recent=32")
    assert parse_method("own.py:Newest:recent=8").recent == 8
    assert len(parse_method("own.py:newest").scores(None, np.zeros((40, 1, 8)))) == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none.py:Newest", "none.py:Newest: there is no file none.py, expected one with Newest"),
        ("own.py:Nothing", "own.py has no Nothing, it has newest, Newest"),
        ("own.py:number", "own.py:number is 5, expected a function of q and k, or a dataclass"),
        ("own.py:Newest:resent=8", "resent"),
        ("own.py:newest:a=1", "own.py:newest is a function, which takes no parameters: a=1"),
        ("broken.py:Newest", "broken.py:Newest: ZeroDivisionError"),
    ],
)
def test_a_file_without_the_method_is_an_error_that_says_why(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(MethodError) as error:
        parse_method(text)
    assert said in str(error.value)


def test_a_method_of_a_file_is_none_of_prompts(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(MethodError, match="is no method of prefill"):
        parse_method(f"{tmp_path}/own.py:Newest", PREFILL)
