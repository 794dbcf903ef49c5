"""The report on a folder of results: tables with intervals, and plots, as Markdown and HTML.

Results of different models, modes, KV types or versions are reported separately, never averaged.
"""

import io
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tamis.evals import plots
from tamis.evals.document import Block, Gallery, Plot, Table, write_document
from tamis.evals.means import (
    Row,
    grouped,
    is_rouge,
    label_of,
    mean_over_tasks,
    overall,
    sample_of,
)
from tamis.evals.plan import TEXT
from tamis.evals.predict import GAIN, LOSS, SHORT
from tamis.evals.scoring import Interval, paired, wilson
from tamis.platform.private_files import write_whole
from tamis.select.notation import DENSE

HIGH_MASS, LOST = 0.9, 0.1  # mass from which, and loss from which, a report warns
NOTES = (
    "Scores are means over samples, from 0 to 1; in parentheses 95 % intervals: Wilson's for a "
    "score, a paired bootstrap over samples (within tasks, 2000 draws) for a difference to dense "
    "attention. Differences are of the same samples; an interval without width says that the pairs "
    "of each task were equal, as a single one is, not that methods are.",
    "All of a prompt but its last token was read once, by dense attention where no other method is "
    "named after “after”, and shared; the last token and the answer were decoded with each method.",
)
FAIR_NOTE = (
    "Fair mode: the context was read before the question was known; the question too was decoded "
    "token by token with each method."
)


def write_report(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write the report of these results into the folder: report.md and report.html."""
    return write_document(list(_blocks(rows)), Path(folder))


def write_csv(rows: Sequence[Row], folder: str | Path) -> Path:
    """Write results.csv into the folder: one line per result, with its numbers and texts."""
    import csv

    plain = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in rows]
    names = list(dict.fromkeys(name for row in plain for name in row))
    path = Path(folder) / "results.csv"
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    with write_whole(path) as file:
        file.write(text.getvalue().encode())
    return path


# The parts of the report


def _title(rows: Sequence[Row]) -> str:
    """The title, with the models and methods of the report."""
    models = ", ".join(dict.fromkeys(str(row["model"]).removesuffix(".gguf") for row in rows))
    labels = [label for label in dict.fromkeys(map(label_of, rows)) if label != DENSE]
    methods = ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
    return f"{models or 'tamis eval'}: {methods or DENSE} beside dense attention"


def _blocks(rows: Sequence[Row]) -> Iterator[Block]:
    yield f"# {_title(rows)}"
    yield from NOTES
    groups = grouped(rows, _mode)
    if not groups:
        yield "There are no results yet."
    for i, group in enumerate(groups.values()):
        yield from _group_blocks(group, f"{i + 1}-" if len(groups) > 1 else "")


def _mode(row: Row) -> tuple[Any, ...]:
    names = ("model", "digest", "device", "version", "raw", "seed")
    # A text has no question, so it is never in fair mode.
    return (*(row[name] for name in names), row["fair"], *row["types"], _rope(row))


def _rope(row: Row) -> str:
    """The scaling of positions, after a comma; "" if it is the model's own."""
    rope = row.get("rope")
    return f", positions {rope['kind']} by {rope['factor']:g}" if rope else ""


def _group_blocks(rows: Sequence[Row], prefix: str) -> Iterator[Block]:
    row = rows[0]
    yield f"## {row['model']}" + (", fair mode" if row["fair"] else "")
    if row["fair"]:
        yield FAIR_NOTE
    prompt = "no chat template" if row["raw"] else "the model's chat template"
    yield (
        f"Digest {row['digest']}, {row['device']}, keys {row['types'][0]} and values "
        f"{row['types'][1]}{_rope(row)}, {prompt}, seed {row['seed']}, tamis {row['version']}; "
        f"{len(rows)} results that took {_spent(rows) / 60:.1f} minutes of prefill and decoding."
    )
    answered = [row for row in rows if row["task"] != TEXT and not is_rouge(row)]
    for name, table in (
        ("Scores", _scores),
        ("Summaries", _summaries),
        ("Prediction of a text", _prediction),
        ("What attention read and kept", _kept),
        ("Speed", _speed),
        ("What was held, by estimate", _estimated),
        ("Every cell", _every),
    ):
        tables = list(table(rows))
        if tables:
            yield f"### {name}"
            yield from tables
        if name == "Scores" and answered:
            yield from _score_plots(answered, prefix)
    yield from _maps(rows, prefix)


def _scores(rows: Sequence[Row]) -> Iterator[Block]:
    """A table for each length: methods down, tasks across, their mean, the difference to dense."""
    rows = [row for row in rows if row["task"] != TEXT and not is_rouge(row)]
    for length, at in grouped(rows, lambda row: row["length"]).items():
        names = list(grouped(at, lambda row: row["task"]))
        body = []
        for label, own in grouped(at, label_of).items():
            by_task = grouped(own, lambda row: row["task"])
            cells = [_mean(by_task.get(name, []), "score") for name in names]
            mean, difference = overall(own, at)
            to_dense = _interval(difference, sign="+") if difference else ""
            body.append([f"`{label}`", *cells, _interval(mean), to_dense, str(len(own))])
        titles = ["method", *names, "mean (95 %)", "to dense (95 %)", "samples"]
        yield f"Length {length}: mean over the tasks of RULER (over all where there are none)."
        yield Table(titles, body)


def _summaries(rows: Sequence[Row]) -> Iterator[Block]:
    rows = [row for row in rows if is_rouge(row)]
    names = ("rouge1", "rouge2", "rougeL")
    body = [
        [str(length), f"`{label}`", *(_mean(own, name) for name in names), str(len(own))]
        for (length, label), own in grouped(rows, _length_and_label).items()
    ]
    if body:
        yield Table(["length", "method", "ROUGE-1", "ROUGE-2", "ROUGE-L", "samples"], body)


def _prediction(rows: Sequence[Row]) -> Iterator[Block]:
    body = []
    texts = [row for row in rows if row["task"] == TEXT]
    for (length, label), own in grouped(texts, _length_and_label).items():
        n, needing = sum(r["n"] for r in own), sum(r["n_needing"] for r in own)
        loss = sum(r["loss"] * r["n"] for r in own) / n
        hard = [r["loss_needing"] * r["n_needing"] for r in own if r["n_needing"]]
        body.append(
            [
                str(length),
                f"`{label}`",
                f"{exp(loss):.3f}",
                f"{exp(sum(hard) / needing):.3f}" if needing else "",
                f"{needing} of {n}",
                _mean(own, "kl", 5),
                _mean(own, "kl_p95", 4),
                _mean(own, "same_top", 4),
            ]
        )
    if body:
        yield (
            f"Tokens that need the context are those of which dense attention loses over {GAIN:g} "
            f"nats more when it sees only {SHORT} tokens before what is predicted, and under "
            f"{LOSS:g} nats with all of it (LongPPL's rule)."
        )
        titles = ["length", "method", "perplexity", "on tokens that need the context"]
        yield Table([*titles, "of these", "KL from dense", "its p95", "same top token"], body)


def _kept(rows: Sequence[Row]) -> Iterator[Block]:
    names = ("read", "tokens", "mass", "best_mass", "recall", "error")
    audited = [row for row in rows if "mass" in row]
    body = [
        [
            str(length),
            f"`{label}`",
            *(_mean(own, name, 0 if name == "tokens" else 3) for name in names),
        ]
        for (length, label), own in grouped(audited, _length_and_label).items()
    ]
    if body:
        yield (
            "Means over audited steps, layers and heads: the share of the keys read, how many, the "
            "attention weight they hold, what as many of the best hold, the share of those best "
            "that were read, and the output's relative error."
        )
        titles = ["length", "method", "read", "keys", "mass", "best mass", "recall", "output error"]
        yield Table(titles, body)
    yield from _lost_despite_mass(audited, rows)


def _lost_despite_mass(audited: Sequence[Row], rows: Sequence[Row]) -> Iterator[Block]:
    """Yield a sentence for each method that holds most attention and answers worse than dense."""
    answered = [row for row in rows if row["task"] != TEXT and not is_rouge(row)]
    for (length, label), own in grouped(audited, _length_and_label).items():
        mass = fmean(row["mass"] for row in own)
        scored = [row for row in answered if (row["length"], row["label"]) == (length, label)]
        at = [row for row in answered if row["length"] == length]
        lost = overall(scored, at)[1] if scored else None
        if mass >= HIGH_MASS and lost is not None and lost.mean <= -LOST:
            yield (
                f"At {length} tokens `{label}` holds {mass:.0%} of attention in the mean and "
                f"scores {-lost.mean:.2f} below dense attention: mass is a mean over heads and "
                "steps, and an answer may rest on one head that finds one token. Look for weak "
                "heads in the map below, and trust the scores."
            )


def _speed(rows: Sequence[Row]) -> Iterator[Block]:
    body = []
    for (length, label), own in grouped(rows, _length_and_label).items():
        dense = {
            sample_of(row): row["step_ms"]
            for row in rows
            if row["label"] == DENSE and row["length"] == length
        }
        ratios = [
            dense[sample_of(row)] / row["step_ms"]
            for row in own
            if sample_of(row) in dense and row["step_ms"]
        ]
        body.append(
            [
                str(length),
                f"`{label}`",
                f"{median(row['prefill_s'] for row in own):.2f}",
                f"{median(row['first_s'] for row in own):.3f}",
                f"{median(row['step_ms'] for row in own):.1f}",
                f"{median(ratios):.2f}" if ratios else "",
            ]
        )
    yield (
        "Medians over samples. A step is the whole model's; its ratio to dense is of the same "
        "sample. `tamis bench` measures attention alone, in alternating runs."
    )
    titles = ["length", "method", "prefill s", "first step s", "step ms", "dense / step"]
    yield Table(titles, body)


def _estimated(rows: Sequence[Row]) -> Iterator[Block]:
    """The retained mass of metered methods, by their own estimates."""
    body = []
    metered = [row for row in rows if "estimate" in row]
    for (length, label), own in grouped(metered, _length_and_label).items():
        found = [row["estimate"] for row in own]
        names = ("chosen_mass", "mass", "mass_p5", "escalated", "dense")
        means = [f"{sum(e[name] for e in found) / len(found):.3f}" for name in names]
        body.append([str(length), f"`{label}`", *means])
    if body:
        yield (
            "Estimates from sampled keys, means over samples: the share of attention that the "
            "method chose and that was held in the end, what all but 5 % of the heads exceed, and "
            "the share of heads that read more, and all."
        )
        titles = ["length", "method", "chosen", "held", "p5", "read more", "read all"]
        yield Table(titles, body)


def _every(rows: Sequence[Row]) -> Iterator[Block]:
    body = []
    rows = [row for row in rows if row["task"] != TEXT]
    dense = {
        (*sample_of(row), row["length"]): row["score"] for row in rows if row["label"] == DENSE
    }
    key = _length_and_label
    for (task, (length, label)), own in grouped(rows, lambda r: (r["task"], key(r))).items():
        pairs = [
            row["score"] - dense[(*sample_of(row), length)]
            for row in own
            if (*sample_of(row), length) in dense
        ]
        difference = _interval(paired([pairs]), sign="+") if pairs and label != DENSE else ""
        score = _interval(wilson(fmean(row["score"] for row in own), len(own)))
        body.append([task, str(length), f"`{label}`", str(len(own)), score, difference])
    if body:
        yield Table(["task", "length", "method", "n", "score (95 %)", "to dense (95 %)"], body)


def _score_plots(rows: Sequence[Row], prefix: str) -> Iterator[Block]:
    """Accuracy over context length, over the share of keys read, and over a step's time.

    There is no plot of a single point.
    """
    lengths = sorted({row["length"] for row in rows})
    y = plots.SHARE._replace(title="score")
    lines = {
        label: [
            plots.Point(length, *mean_over_tasks(at))
            for length, at in sorted(grouped(own, lambda row: row["length"]).items())
        ]
        for label, own in grouped(rows, label_of).items()
    }
    x = plots.axis_of("context in tokens", lengths, log=True)
    found = []
    if len(lengths) > 1:
        found.append(Plot(f"{prefix}score-context", plots.chart(lines, x, y, lines=True)))
    for name, title in (("read", "share of the keys read"), ("step_ms", "ms a step")):
        length, at_most = _longest_compared(rows)
        points = {
            label: [plots.Point(fmean(known), *mean_over_tasks(own))]
            for label, own in grouped(at_most, label_of).items()
            if (known := [row[name] for row in own if name in row])
        }
        if len(points) > 1:
            x = plots.axis_of(
                f"{title}, at {length} tokens", [p.x for own in points.values() for p in own]
            )
            found.append(Plot(f"{prefix}score-{name}", plots.chart(points, x, y, lines=False)))
    if found:
        yield Gallery(tuple(found))


def _longest_compared(rows: Sequence[Row]) -> tuple[int, Sequence[Row]]:
    """The longest length at which there are several methods, else the shortest; its rows."""
    by_length = grouped(rows, lambda row: row["length"])
    compared = [length for length, at in by_length.items() if len({label_of(r) for r in at}) > 1]
    length = max(compared, default=min(by_length))
    return length, by_length[length]


def _maps(rows: Sequence[Row], prefix: str) -> Iterator[Block]:
    audited = [row for row in rows if "mass_by_layer" in row]
    if not audited:
        return
    length = max(row["length"] for row in audited)
    at_most = [row for row in audited if row["length"] == length]
    found = []
    for i, (label, own) in enumerate(grouped(at_most, label_of).items()):
        layers = zip(*(row["mass_by_layer"] for row in own), strict=True)
        means = [[fmean(heads) for heads in zip(*layer, strict=True)] for layer in layers]
        found.append(Plot(f"{prefix}mass-{i + 1}", plots.heat_map(means, label)))
    yield "### Retained mass by layer and KV head"
    yield f"At {length} tokens; the scale is beside each map."
    yield Gallery(tuple(found))


# Small things


def _length_and_label(row: Row) -> tuple[int, str]:
    return row["length"], row["label"]


def _mean(rows: Sequence[Row], name: str, digits: int = 3) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{fmean(values):.{digits}f}" if values else ""


def _interval(found: Interval, sign: str = "") -> str:
    return f"{found.mean:{sign}.3f} ({found.low:{sign}.2f} to {found.high:{sign}.2f})"


def _spent(rows: Sequence[Row]) -> float:
    """Seconds of prefill, counted once per sample, and of decoding."""
    prefills = {
        (*sample_of(row), row["length"], row["prefill"]): float(row["prefill_s"]) for row in rows
    }
    return sum(prefills.values()) + sum(row["decode_s"] for row in rows)
