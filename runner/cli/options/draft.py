"""The flags of speculative decoding: what drafts tokens, which the model checks."""

import argparse
from pathlib import Path
from typing import Any

from tamis.cli.options import common, group
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--model-draft, --draft-mtp, --draft-attn and --draft-max."""
    draft = group(parser, "drafts")
    draft.add_argument(
        "-md",
        "--model-draft",
        metavar="MODEL",
        help="speculative decoding with this smaller model of the same family: it drafts tokens "
        "and the model verifies them in one pass; the answer is the same as without drafts "
        "(default: no drafts)",
    )
    draft.add_argument(
        "--draft-mtp",
        action="store_true",
        help="speculative decoding with the model's own multi-token prediction (MTP) layer, if its "
        "file has one",
    )
    draft.add_argument(
        "--draft-attn",
        metavar="METHOD",
        help="self-speculative decoding: the model drafts with this sparse method (see `tamis "
        "methods`) over the same KV cache, and dense attention verifies (default: no drafts)",
    )
    draft.add_argument(
        "--draft-max",
        "--draft",
        "--draft-n",
        type=common.count,
        default=8,
        metavar="N",
        help="longest draft in tokens, 1 to 64, with --draft-attn 1 to 15 (default: %(default)s)",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that drafts do not go with; --prefill auto is dense with them."""
    asked = _asked(arguments)
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are ways to draft: leave out all but one")
    if not asked:
        return
    if arguments.prefill == "auto":
        arguments.prefill = "dense"
    if arguments.attn == "auto":
        arguments.attn = "dense"  # the default: nobody has asked for it
    if arguments.attn != "dense" or arguments.prefill != "dense":
        raise UsageError("drafts are checked as prompts are: leave out --attn and --prefill")
    for name in ("audit", "context_shift"):
        if getattr(arguments, name, False):
            name = "--" + name.replace("_", "-")
            raise UsageError(f"drafts and {name} do not go together: leave out one")
    if arguments.draft_attn is not None:
        if arguments.min_mass is not None:
            raise UsageError("drafts and --min-mass do not go together: leave out one")
        arguments.attn = arguments.draft_attn  # of decode steps, which all are drafts
    if not 1 <= arguments.draft_max <= 64:
        raise UsageError(f"--draft-max is {arguments.draft_max}, expected 1 to 64")


def _asked(arguments: argparse.Namespace) -> list[str]:
    """The flags that name what drafts, of those that are given."""
    ways = {
        "--model-draft": arguments.model_draft is not None,
        "--draft-mtp": arguments.draft_mtp,
        "--draft-attn": arguments.draft_attn is not None,
    }
    return [flag for flag, is_asked in ways.items() if is_asked]


def open_draft(engine: Any, session: Any, arguments: argparse.Namespace) -> Any:
    """What drafts for the session; None where nothing is to. Raises ValueError, OSError."""
    if not _asked(arguments):
        return None
    from tamis.engine.drafting import AttentionDraft, ModelDraft, NextDraft
    from tamis.engine.engine import Engine

    if arguments.draft_mtp:
        return NextDraft(engine, session.n_ctx)
    if arguments.draft_attn is not None:
        return AttentionDraft(session)

    progress = common.Progress()
    path = draft_file(arguments)
    where = common.devices(arguments)
    small = Engine.load(path, n_threads=arguments.threads, progress=progress, **where)
    progress.clear()
    return ModelDraft(small, engine, session.n_ctx)


def draft_file(arguments: argparse.Namespace) -> Path:
    """The file of --model-draft. Raises ModelError."""
    return common.model_file(arguments.model_draft, common.Progress()).absolute()


def drafting(session: Any, draft: Any, arguments: argparse.Namespace) -> Any:
    """The session, whose decode steps check drafts where there is a draft."""
    if draft is None:
        return session
    from tamis.engine.drafting import Drafting

    return Drafting(session, draft, arguments.draft_max)


def report(found: Any) -> None:
    """Write on standard error how many drafted tokens were taken."""
    if getattr(found, "n_drafted", 0):
        note(f"drafts       {found.n_taken} of {found.n_drafted} drafted tokens taken")
