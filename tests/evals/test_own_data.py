"""`tamis eval --data`: a file's prompts and answers, in three forms, by five metrics and ROUGE."""

import csv
import json
from pathlib import Path

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.evals import scoring
from tamis.evals.own_data import DataError, read_data


def write(folder: Path, *rows: object) -> str:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_three_forms_are_read(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "P", "answer": "A"},
        {"prompt": "P", "answers": ["A", "B"], "metric": "f1", "max_tokens": 7},
        {"context": "C", "input": "Q?", "answers": ["A"], "dataset": "hotpotqa_e", "_id": "x"},
        {"context": "C", "input": "", "answers": ["A"], "dataset": "gov_report"},
        {"context": "C", "input": "I", "answers": ["A"], "dataset": "repobench-p"},
        {"index": 0, "input": "I", "outputs": ["A", "B"], "length": 4096},
    )
    found = [
        (e.draft.context + e.draft.question, e.draft.expected, e.metric, e.n_predict)
        for e in read_data(path).examples
    ]
    assert found == [
        ("P", ("A",), "match_part", 64),
        ("P", ("A", "B"), "f1", 7),
        ("C\n\nQ?", ("A",), "f1", 64),
        ("C", ("A",), "rouge", 256),
        ("C\n\nI", ("A",), "edit", 64),
        ("I", ("A", "B"), "match_all", 128),
    ]
    assert {example.metric for example in read_data(path, "exact").examples} == {"exact"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "expected a JSON object"),
        ({"question": "Q"}, "has the keys question: expected prompt and answer"),
        ({"prompt": "P", "answers": []}, "at least one answer"),
        ({"prompt": 1, "answer": "A"}, "are texts"),
        ({"prompt": "P", "answer": "A", "metric": "bleu"}, "metric is 'bleu', expected match_part"),
        ({"prompt": "P", "answer": "A", "max_tokens": 0}, "max_tokens is 0"),
        ({"context": "C", "input": "", "answers": ["A"], "dataset": "vqa"}, "no metric here"),
    ],
)
def test_a_wrong_line_is_reported_with_its_number(tmp_path, row, said):
    path = write(tmp_path, {"prompt": "P", "answer": "A"}, row)
    with pytest.raises(DataError) as found:
        read_data(path)
    assert f"{path}, line 2" in str(found.value)
    assert said in str(found.value)


def test_an_edit_similarity_is_of_the_first_line_of_code():
    answer = "\n```python\n# as above\nreturn a + b\nprint(a)\n```"
    assert scoring.edit(answer, ["return a + b"]) == 1
    assert scoring.edit("return a + c // 2\nreturn a", ["x", "return b"]) == 0.88
    assert scoring.edit("abcd", ["bcde"]) == 0.75
    assert scoring.edit("# nothing", ["return"]) == 0


def test_f1_and_exact_are_of_words():
    assert scoring.f1("The cat sat.", ["a cat sat"]) == 1
    assert scoring.f1("cat dog", ["cat bird bird", "x"]) == pytest.approx(0.4)
    assert scoring.f1("dog", ["cat"]) == 0
    assert scoring.exact("A  Cat!", ["dog", "the cat"]) == 1
    assert scoring.exact("a cat sat", ["cat"]) == 0


def test_methods_are_compared_on_a_file(tmp_path, capsys):
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    rows = [
        {"prompt": "the cat " * (5 + i), "answer": "dog", "metric": "f1", "max_tokens": 4}
        for i in range(3)
    ]
    data, out = write(tmp_path, *rows), tmp_path / "out"
    words = ["eval", "-m", str(model), "-o", str(out), "--data", data, "--raw", "--audit", "0"]
    words += ["--attn", "window:sink=4,recent=16", "--csv"]
    assert main(words) == 0
    printed = capsys.readouterr().out.split()
    assert [Path(path).name for path in printed] == ["report.md", "report.html", "results.csv"]
    with (out / "results.csv").open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 6
    assert {row["label"] for row in found} == {"dense", "window:sink=4,recent=16"}
    assert {row["task"] for row in found} == {"mine"}
    page = (out / "report.html").read_text()
    assert "<title>tiny: window:sink=4,recent=16 beside dense attention</title>" in page
    assert "`" not in page
    assert '<meta name="viewport"' in page
    assert "prefers-color-scheme:dark" in page
    assert main(words) == 0, "nothing is run twice"
    assert "6 results are there, 0 are missing" in capsys.readouterr().err
    assert main([*words, "--task", "ruler"]) == 2
    assert main(["eval", "-o", str(out), "--metric", "f1"]) == 2
