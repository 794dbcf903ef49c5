"""The report of results written by hand: the numbers in its tables, its plots, its pages."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from tamis.evals import plots
from tamis.evals.document import Table, html, markdown
from tamis.evals.report import write_report

SVG = "{http://www.w3.org/2000/svg}"


def row(task: str, sample: int, label: str, score: float, **more: Any) -> dict[str, Any]:
    mode = {"model": "m.gguf", "digest": "d", "device": "cpu", "version": "1/1", "raw": False}
    mode |= {"seed": 0, "fair": False, "types": ["f16", "f16"], "prefill": "Dense()"}
    times = {"prefill_s": 60.0, "first_s": 0.1, "step_ms": 20.0, "decode_s": 30.0}
    known = {"task": task, "length": 4096, "sample": sample, "label": label, "score": score}
    return mode | times | known | more


def seen(share: float) -> dict[str, Any]:
    """What an audit found; the first of two layers keeps all, the second `share`."""
    return {
        "read": share,
        "tokens": round(4096 * share),
        "mass": (1 + share) / 2,
        "best_mass": 0.9,
        "recall": 0.5,
        "error": 0.1,
        "mass_by_layer": [[1.0, 1.0], [share, share]],
    }


ROWS = [
    row("niah_single_1", 0, "dense", 1.0, read=1.0),
    row("niah_single_1", 1, "dense", 1.0, read=1.0),
    row("vt", 0, "dense", 0.6, read=1.0),
    row("niah_single_1", 0, "window", 0.0, step_ms=10.0, **seen(0.25)),
    row("niah_single_1", 1, "window", 1.0, step_ms=10.0, **seen(0.25)),
    row("vt", 0, "window", 0.4, step_ms=10.0, **seen(0.25)),
    row("passkey", 0, "dense", 1.0, read=1.0),
    row("vt", 0, "dense", 0.8, read=1.0, length=8192),
]


def lines(text: str, start: str) -> list[list[str]]:
    """The cells of the Markdown lines that begin so."""
    found = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in found]


@pytest.fixture
def report(tmp_path):
    paths = write_report(ROWS, tmp_path)
    assert [path.name for path in paths] == ["report.md", "report.html"]
    return paths[0].read_text()


def test_scores_are_means_of_tasks_and_differences_are_paired(report):
    window, *_ = lines(report, "`window`")
    # niah 0.5, vt 0.4: the tasks' mean is 0.45; to dense: (-0.5 - 0.2) / 2. Samples: three.
    assert window[1:3] == ["0.500", "0.400"]
    assert window[4].startswith("0.450 (")
    assert window[5].startswith("-0.350 (")
    assert window[6] == "3"


def test_tasks_outside_of_ruler_are_shown_and_not_averaged(report):
    dense, longer, *_ = lines(report, "`dense`")
    assert dense[:4] == ["`dense`", "1.000", "0.600", "1.000"]
    assert dense[4].startswith("0.800 (")
    assert longer[1] == "0.800"  # the table of 8192 tokens has vt alone


def test_what_metered_methods_held_is_the_mean_of_their_estimates(tmp_path):
    names = ("chosen_mass", "mass", "mass_p5", "escalated", "dense")
    rows = [
        row("vt", i, "auto", 1.0, estimate=dict.fromkeys(names, value))
        for i, value in enumerate((0.5, 0.75))
    ]
    report = write_report(rows, tmp_path)[0].read_text()
    assert ["4096", "`auto`", *["0.625"] * 5] in lines(report, "4096 | `auto`")


def test_speed_is_beside_dense_of_the_same_samples(report):
    (window,) = [cells for cells in lines(report, "4096 | `window`") if len(cells) == 6]
    assert window[2:] == ["60.00", "0.100", "10.0", "2.00"]


def test_time_counts_a_shared_prefill_once(report):
    # Five samples of a minute, eight results of half a minute each.
    assert "8 results that took 9.0 minutes" in report


def test_what_attention_kept_is_shown_where_it_was_audited(report):
    (kept,) = [cells for cells in lines(report, "4096 | `window`") if len(cells) == 8]
    assert kept[2:] == ["0.250", "1024", "0.625", "0.900", "0.500", "0.100"]


def test_a_text_is_pooled_over_tokens(tmp_path):
    known = {"n": 100, "kl": 0.1, "kl_p95": 0.2, "same_top": 0.9}
    rows = [
        row("text", 0, "dense", 0, loss=1.0, n_needing=3, loss_needing=2.0, **known),
        row("text", 1, "dense", 0, loss=2.0, n_needing=1, loss_needing=0.0, **known),
        row("text", 2, "dense", 0, loss=3.0, n_needing=0, loss_needing=None, **known),
    ]
    text = write_report(rows, tmp_path)[0].read_text()
    cells = next(cells for cells in lines(text, "4096 | `dense`") if len(cells) == 8)
    # e^2; of the four tokens that need the context the mean loss is 6 / 4: e^1.5.
    assert cells[2:] == ["7.389", "4.482", "4 of 300", "0.10000", "0.2000", "0.9000"]
    assert "### Scores" not in text


def test_models_and_modes_are_apart(tmp_path):
    fair = [dict(line, fair=True) for line in ROWS]
    text = write_report([*ROWS, *fair], tmp_path)[0].read_text()
    assert "## m.gguf\n" in text
    assert "## m.gguf, fair mode\n" in text
    assert "question too was decoded" in text
    assert "8 results" in text
    assert (tmp_path / "plots" / "2-score-context.svg").exists()


def test_an_empty_folder_has_a_report(tmp_path):
    assert "no results yet" in write_report([], tmp_path)[0].read_text()


def test_plots_are_files_for_markdown_and_inside_the_page(report, tmp_path):
    names = {"score-context", "score-read", "score-step_ms", "mass-1"}
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == names
    assert all(f"](plots/{name}.svg)" in report for name in names)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg ") == 4
    assert "src=" not in page
    assert "href=" not in page
    for path in (tmp_path / "plots").iterdir():
        ET.fromstring(path.read_text())


def test_a_heat_map_has_a_cell_a_layer_and_head():
    image = ET.fromstring(plots.heat_map([[1.0, 0.0], [0.5, 0.25], [0.0, 2.0]], "a<b"))
    ramp = [each for each in image.findall(f"{SVG}rect") if each.get("class") == "ramp"]
    cells = [each for each in ramp if each.find(f"{SVG}title") is not None]
    assert [cell.get("fill-opacity") for cell in cells[:3]] == ["1.000", "0.000", "0.500"]
    assert cells[5].get("fill-opacity") == "1.000"  # rounding may make a mean more than 1
    assert len(cells) == 6
    bar = [float(each.get("fill-opacity", "")) for each in ramp if each not in cells]
    assert bar[0] == 1
    assert bar[-1] == 0
    assert sorted(bar, reverse=True) == bar
    assert {"0", "0.5", "1"} <= {text.text for text in image.findall(f"{SVG}text")}


def test_every_shape_has_a_colour_for_white_and_one_for_dark_paper():
    x = plots.axis_of("x", [1024, 4096], log=True)
    series = {f"m{i}": [plots.Point(1024, 0.5, 0.4, 0.6)] for i in range(12)}
    for svg in (plots.heat_map([[0.5]], "m"), plots.chart(series, x, plots.SHARE, lines=True)):
        image = ET.fromstring(svg)
        light, _, dark = (image.find(f"{SVG}style").text or "").partition("@media(prefers-color")
        used = {str(each.get("class")) for each in image.iter() if each.get("class")}
        assert {"paper", "ink"} <= used
        for name in used:
            (on_white,) = re.findall(rf"\.{name}\{{([^}}]*)\}}", light)
            (on_dark,) = re.findall(rf"\.{name}\{{([^}}]*)\}}", dark)
            assert on_white != on_dark
        assert not re.search(r'(?:fill|stroke)="#', svg)


def test_there_is_no_plot_of_a_single_point(tmp_path):
    rows = [row("vt", i, "dense", 1.0, read=1.0) for i in range(3)]
    text = write_report(rows, tmp_path)[0].read_text()
    assert "### Scores" in text
    assert "![" not in text
    assert not list((tmp_path / "plots").iterdir())


@pytest.mark.parametrize(("mass", "score", "warned"), [(0.97, 0.5, 1), (0.8, 0.5, 0), (0.97, 1, 0)])
def test_wrong_answers_in_spite_of_a_high_mass_are_pointed_out(tmp_path, mass, score, warned):
    audited = seen(0.25) | {"mass": mass}
    rows = [row("vt", i, "dense", 1.0, read=1.0) for i in range(3)]
    rows += [row("vt", i, "window", score, **audited) for i in range(3)]
    text = write_report(rows, tmp_path)[0].read_text()
    said = f"At 4096 tokens `window` holds 97% of attention in the mean and scores {1 - score:.2f}"
    assert text.count(said) == warned
    assert ("trust the scores" in text) == bool(warned)


def test_points_are_where_their_values_are():
    x = plots.axis_of("x", [1024, 4096], log=True)
    points = {"m": [plots.Point(1024, 0.0, 0.0, 0.5), plots.Point(4096, 1.0, 0.5, 1.0)]}
    image = ET.fromstring(plots.chart(points, x, plots.SHARE, lines=True))
    (line,) = image.findall(f"{SVG}polyline")
    (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in line.get("points", "").split())
    assert x1 < x2
    assert (y1, y2) == (plots.HEIGHT - 44, 18)  # up is more


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([0.9], (0, 0.2, 0.4, 0.6, 0.8, 1.0)), ([37, 5], (0, 10, 20, 30, 40)), ([0.0], None)],
)
def test_axes_begin_at_zero_and_have_round_ticks(values, ticks):
    axis = plots.axis_of("", values)
    assert axis.low == 0
    assert axis.high >= max(values)
    assert 2 <= len(axis.ticks) <= 7
    if ticks is not None:
        assert axis.ticks == pytest.approx(ticks)


def test_text_is_escaped_in_the_page():
    blocks = ["## a < b", Table(["<x>"], [["&"]])]
    assert "<h2>a &lt; b</h2>" in html(blocks)
    assert "<th>&lt;x&gt;</th>" in html(blocks)
    assert "| <x> |\n| --- |\n| & |" in markdown(blocks)
