"""The findings of an audit, as tables and as JSON."""

from typing import Any

from tamis.cli.terminal import note, table

N_WORST = 5  # KV heads that a table has below the means
COLUMNS = {
    "layer": "layer",
    "head_kv": "KV head",
    "mass": "mass",
    "mass_p5": "p5",
    "best_mass": "best",
    "recall": "recall",
    "error": "error",
    "tokens": "tokens",
    "of": "of",
}
BOUND_COLUMNS = {
    "bound": "bound, mean",
    "measured": "measured",
    "allowed": "allowed",
    "tightest": "tightest",
    "checked": "checked",
}


def summary(audit: Any) -> dict[str, Any]:
    """Means over all audited steps, layers and heads, and the bytes that a step reads."""
    attend, select, dense = audit.n_bytes()
    read = {"mb_attention": attend, "mb_selection": select, "mb_dense": dense}
    found = {"steps": audit.n_step, **_row(audit.total()), **_estimate(audit)}
    return found | {key: round(n_bytes / 1e6, 3) for key, n_bytes in read.items()}


def report(audit: Any) -> dict[str, Any]:
    """All findings for JSON: the summary, each layer and KV head, the bounds."""
    if not audit.n_step:
        return {"steps": 0}
    groups = [
        {"layer": found.layer, "head_kv": found.head_kv, **_row(found)} for found in audit.groups()
    ]
    return {**summary(audit), "groups": groups, "bounds": _bounds(audit)}


def write(audit: Any, *, every_head: bool = False) -> None:
    """Write the means, the worst heads or all, and the bounds to standard error."""
    if not audit.n_step:
        note("audit: no decode step was due")
        return
    found = report(audit)
    heads = found["groups"]
    if not every_head:
        heads = sorted(heads, key=lambda group: group["mass"])[:N_WORST]
    text = table.lines([{"layer": "all", **found}, *heads], COLUMNS)
    if len(found["groups"]) > len(heads):
        n = len(found["groups"])
        text.append(f"the {N_WORST} KV heads of {n} that retain least; --audit-table: all")
    if found["bounds"]:
        text += ["", *table.lines(found["bounds"], BOUND_COLUMNS)]
    text.append(
        f"{found['steps']} steps audited; a step reads {found['mb_attention']:.1f} MB of keys and "
        f"values and {found['mb_selection']:.1f} MB to select them, dense attention "
        f"{found['mb_dense']:.1f} MB"
    )
    if "estimate" in found:
        e = found["estimate"]
        text.append(
            f"estimated mass {e['mass']:.3f}, exact {e['exact']:.3f}; the estimate of a head errs "
            f"by {e['error']:.3f} in the mean; {e['low']:.0%} of the heads hold less than 0.9: "
            f"{e['caught']:.0%} of them are found, and {e['false_alarms']:.1%} of the others"
        )
    note("\n" + "\n".join(text))


def _estimate(audit: Any) -> dict[str, Any]:
    """The estimates of a metered method beside the exact masses, if there are any."""
    found = audit.estimate()
    if found is None:
        return {}
    return {"estimate": {key: round(value, 4) for key, value in found._asdict().items()}}


def _row(found: Any) -> dict[str, Any]:
    numbers = ("mass", "mass_p5", "best_mass", "recall", "error")
    row = {key: round(getattr(found, key), 4) for key in numbers}
    return row | {"tokens": round(found.n_kept), "of": round(found.n_seen)}


def _bounds(audit: Any) -> list[dict[str, Any]]:
    return [
        {
            "bound": bound.name,
            "measured": float(f"{bound.measured:.4g}"),
            "allowed": float(f"{bound.allowed:.4g}"),
            "tightest": float(f"{bound.tightest:.4g}"),
            "checked": "every sample" if bound.holds_always else "shown only",
        }
        for bound in audit.bounds()
    ]
