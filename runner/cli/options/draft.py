"""The flags of speculative decoding, by which a drafter proposes tokens that the model verifies."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tamis.cli.options import common, group
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import say

NGRAM = "ngram-simple"  # the name of llama.cpp's --spec-type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model-draft, --draft-mtp, --draft-attn, --draft-max and those of n-grams."""
    draft = group(parser, "drafts")
    add_ngram_arguments(draft)
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


def add_ngram_arguments(draft: Any) -> None:
    """Add --spec-type and the sizes of n-grams and their drafts."""
    draft.add_argument(
        "--spec-type",
        choices=("none", NGRAM),
        help="speculative decoding by the text itself: where the last tokens stood before, those "
        "that followed them are the draft, of a few tokens while drafts are not taken; alone, or "
        "before what another flag names as a draft. none: only what that flag names (default: "
        f"{NGRAM} on a CPU with dense attention, where no other flag names a draft)",
    )
    draft.add_argument(
        "--spec-ngram-simple-size-n",
        type=common.count,
        default=6,  # SIZE_N and SIZE_M of engine.ngram_draft, which needs NumPy
        metavar="N",
        help=f"tokens that {NGRAM} looks up, 1 to 64 (default: %(default)s)",
    )
    draft.add_argument(
        "--spec-ngram-simple-size-m",
        type=common.count,
        default=15,
        metavar="N",
        help=f"longest draft of {NGRAM} in tokens, 1 to 15 (default: %(default)s)",
    )


def check(arguments: argparse.Namespace, alone: Sequence[str] = ("audit", "context_shift")) -> None:
    """Raise UsageError for flags that drafts do not go with; --prefill auto is dense with them.

    alone: the flags that no draft goes with, by their names in `arguments`.
    """
    asked = _asked(arguments)
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are ways to draft: leave out all but one")
    for flag, size, most in (
        ("--spec-ngram-simple-size-n", arguments.spec_ngram_simple_size_n, 64),
        ("--spec-ngram-simple-size-m", arguments.spec_ngram_simple_size_m, 15),
    ):
        if not 1 <= size <= most:
            raise UsageError(f"{flag} is {size}, expected 1 to {most}")
    if not asked:
        if arguments.spec_type == NGRAM:
            _check_alone(arguments, alone)
        return
    if arguments.prefill == "auto":
        arguments.prefill = "dense"
    if arguments.attn == "auto":
        arguments.attn = "dense"  # the default: the user did not ask for it
    if arguments.attn != "dense" or arguments.prefill != "dense":
        raise UsageError("drafts are checked as prompts are: leave out --attn and --prefill")
    _check_alone(arguments, alone)
    if arguments.draft_attn is not None:
        if arguments.min_mass is not None:
            raise UsageError("drafts and --min-mass do not go together: leave out one")
        common.check_methods(arguments.draft_attn, "dense", "--draft-attn")
        arguments.attn = arguments.draft_attn  # the method of decode steps, all of which are drafts
    if not 1 <= arguments.draft_max <= 64:
        raise UsageError(f"--draft-max is {arguments.draft_max}, expected 1 to 64")


def _check_alone(arguments: argparse.Namespace, alone: Sequence[str]) -> None:
    """Raise UsageError for flags that exclude every kind of draft."""
    for name in alone:
        if getattr(arguments, name, False):
            name = "--" + name.replace("_", "-")
            raise UsageError(f"drafts and {name} do not go together: leave out one")


def _asked(arguments: argparse.Namespace) -> list[str]:
    """The given flags that name a drafter."""
    ways = {
        "--model-draft": arguments.model_draft is not None,
        "--draft-mtp": arguments.draft_mtp,
        "--draft-attn": arguments.draft_attn is not None,
    }
    return [flag for flag, is_asked in ways.items() if is_asked]


def open_draft(engine: Any, session: Any, arguments: argparse.Namespace) -> Any:
    """The drafter of the session; None without one. Raises ValueError, OSError."""
    from tamis.engine.ngram_draft import with_ngrams

    own = _own_draft(engine, session, arguments) if _asked(arguments) else None
    return with_ngrams(own, session, ngram(arguments), arguments.draft_max)


def ngram(arguments: argparse.Namespace) -> Any:
    """The NGrams of the flags; None without them."""
    from tamis.engine.ngram_draft import NGrams

    if arguments.spec_type == "none":
        return None
    if arguments.spec_type is None and getattr(arguments, "context_shift", False):
        return None
    sizes = arguments.spec_ngram_simple_size_n, arguments.spec_ngram_simple_size_m
    return NGrams(*sizes, asked=arguments.spec_type is not None)


def moved(draft: Any, engine: Any, session: Any, arguments: argparse.Namespace) -> Any:
    """The drafter for another session of the same model. Raises ValueError."""
    if not _asked(arguments) and arguments.spec_type is None:
        return open_draft(engine, session, arguments)
    if draft is not None:
        draft = draft.moved_to(session)
        draft.check(session)
    return draft


def reopened(engine: Any, session: Any, arguments: argparse.Namespace) -> Any:
    """The drafter for another model, if it does not depend on the first one. Raises ValueError."""
    if arguments.model_draft is not None or arguments.draft_mtp:
        return None
    return open_draft(engine, session, arguments)


def _own_draft(engine: Any, session: Any, arguments: argparse.Namespace) -> Any:
    """The drafter that the flags name. Raises ValueError, OSError."""
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
    """The session, wrapped to verify drafts if there is a drafter."""
    if draft is None:
        return session
    from tamis.engine.drafting import Drafting

    return Drafting(session, draft, arguments.draft_max)


def report(found: Any) -> None:
    """Write on standard error how many drafted tokens were accepted."""
    if getattr(found, "n_drafted", 0):
        say(f"drafts       {found.n_taken} of {found.n_drafted} drafted tokens taken")
