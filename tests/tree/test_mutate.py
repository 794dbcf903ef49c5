"""The tool that plants faults: what it plants, and that the code runs with it."""

import json
import os
import subprocess
import sys
import weakref
from types import ModuleType

import pytest

from tamis.tools import mutate_plugin
from tamis.tools.mutate_edits import compiles, faults_of

SOURCE = '''"""A module."""
import re
LIMIT: int = 5
NAME = re.compile("[a-z]+")


def allowed(text: str, n: int = 3) -> bool:
    """Whether a name is short enough: at most 9."""
    if not NAME.fullmatch(text):
        raise ValueError(f"{text!r} has {n + 1} wrong letters, expected at most {LIMIT}")
    seen = [0]
    seen.append(
        len(text),
    )
    return seen[-1] < LIMIT and n >= 2


class Counter:
    step = 2

    def add(self, n):
        self.total = n + self.step
'''


def lines(source):
    return [str(fault).partition(" ")[2] for fault in faults_of("formats/x.py", source)]


def test_what_a_modules_loop_does_is_seen_by_tests_of_what_it_names():
    source = "class A:\n    pass\n\n\nfor _name in ('x', 'y'):\n    setattr(A, _name, 1)\n"
    (fault,) = [f for f in faults_of("formats/x.py", source) if f.kind == "statement removed"]
    assert (fault.where, fault.names) == ("", ("setattr", "A"))


def test_faults_are_of_these_kinds():
    found = lines(SOURCE)
    for expected in (
        "boundary: 5 -> (6)",
        "boundary: 5 -> (4)",
        "call: NAME.fullmatch(text) -> (NAME.match(text))",
        "condition: not NAME.fullmatch(text) -> (NAME.fullmatch(text))",
        "statement removed: seen.append( len(text), ) -> pass",
        "comparison: seen[-1] < LIMIT -> (seen[-1] <= LIMIT)",
        "comparison: n >= 2 -> (n > 2)",
        "condition: seen[-1] < LIMIT and n >= 2 -> (seen[-1] < LIMIT or n >= 2)",
        "arithmetic: n + self.step -> (n - self.step)",
        "statement removed: self.total = n + self.step -> pass",
    ):
        assert expected in found, found
    assert sum(line.startswith("raise dropped") for line in found) == 1


def test_messages_annotations_and_docstrings_are_left_alone():
    source = '''def f(x: "1 < 2", y: int | 3 = None) -> 4:
    """5 < 6."""
    z: 7 = x
    assert z, 8
    raise ValueError(f"{x + 9}", 10 < 11)
'''
    assert lines(source) == ['raise dropped: raise ValueError(f"{x + 9}", 10 < 11) -> pass']


def test_a_fault_keeps_the_number_of_lines_and_compiles():
    for fault in faults_of("formats/x.py", SOURCE):
        planted = fault.planted(SOURCE)
        assert planted != SOURCE
        assert planted.count("\n") == SOURCE.count("\n")
        assert compiles(planted)
    assert not compiles("def f(:")


def test_a_fault_is_the_same_one_where_lines_move():
    moved = SOURCE.replace("\n\n\ndef", "\n\nOTHER = 'x'\n\n\ndef", 1)
    keys, again = ({f.key for f in faults_of("formats/x.py", s)} for s in (SOURCE, moved))
    assert keys == again
    assert len(keys) == len(faults_of("formats/x.py", SOURCE)), "no two are the same"


def test_what_runs_at_import_is_known_from_what_a_call_runs():
    found = {str(f).partition(" ")[2]: (f.where, f.names) for f in faults_of("x.py", SOURCE)}
    assert found["boundary: 5 -> (6)"] == ("", ("LIMIT",))
    assert found["comparison: n >= 2 -> (n > 2)"][0] == "allowed"
    assert found["arithmetic: n + self.step -> (n - self.step)"][0] == "add"
    assert found["boundary: 3 -> (4)"] == ("", ("allowed",)), "a default"


def test_the_functions_of_a_module_get_the_code_of_another_text(monkeypatch, tmp_path):
    gone = weakref.proxy(type("Gone", (), {})())  # an object that is asked nothing: it raises
    module = ModuleType("tamis.formats.planted")
    module.__file__ = str(tmp_path / "planted.py")
    exec(compile(SOURCE, module.__file__, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    counter, held = module.Counter(), module.allowed
    found = faults_of("formats/planted.py", SOURCE)
    (fault,) = (f for f in found if f.kind == "arithmetic" and f.where == "add")
    assert mutate_plugin.patch("", fault.file, fault.planted(SOURCE))
    counter.add(3)
    assert (counter.total, held("abc")) == (1, True)
    assert not mutate_plugin.patch("", "formats/not_there.py", SOURCE)
    assert type(gone) is weakref.ProxyType


@pytest.mark.parametrize(
    ("statuses", "needed", "expected"),
    [
        (["killed"], 99, "killed"),
        (["time limit"], 5, "time limit"),
        (["time limit", "survived"], 30, "survived"),
        (["time limit"], None, "not known"),
    ],
)
def test_what_the_time_limit_ended_is_killed_only_where_its_tests_end_without_it(
    statuses, needed, expected, monkeypatch, tmp_path
):
    planting = mutate_plugin.Planting({"state": tmp_path})
    monkeypatch.setattr(planting, "_planted", lambda *_: statuses.pop(0))
    monkeypatch.setattr(planting, "_seconds", lambda *_: needed)
    planting._plant({"key": "k", "seconds": 10, "said": ""}, {})
    assert json.loads((tmp_path / "results.jsonl").read_text())["status"] == expected
    assert statuses == []


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("runner/kv/pages.py", "tamis.kv.pages"),
        ("runner/__init__.py", "tamis"),
        ("formats/__init__.py", "tamis.formats"),
        ("bindings/serve/http/app.py", "tamis.bindings.serve.http.app"),
    ],
)
def test_the_module_of_a_source(file, module):
    assert mutate_plugin.module_of(file) == module
    assert mutate_plugin.source_of(f"/v/{file.removeprefix('runner/')}", "/v/") == file
    assert mutate_plugin.source_of(f"/elsewhere/{file}", "/v/") == ""


@pytest.mark.slow
def test_faults_are_planted_in_a_copy_and_what_survives_is_printed(root, tmp_path):
    file = "formats/strings.py"
    before = (root / file).read_bytes()
    command = [sys.executable, "-m", "tamis.tools.mutate", file, "--count", "8"]
    command += ["--state", str(tmp_path), "--tests", "tests/formats/test_strings.py"]
    # A user's folder of its own: the tests of one folder alternate, and these run within a test.
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=root, env=env
        )
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1], "what was planted is not planted again"
    assert f"| `{file}` | 8 |" in outputs[0]
    results = (tmp_path / "results.jsonl").read_text()
    assert results.count("\n") == 8
    assert '"killed"' in results
    assert (root / file).read_bytes() == before


def test_another_folder_than_a_checkout_is_refused(tmp_path):
    command = [sys.executable, "-m", "tamis.tools.mutate", "formats"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "is no checkout of tamis" in done.stderr
    assert not any(tmp_path.iterdir())
