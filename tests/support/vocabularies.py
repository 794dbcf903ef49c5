"""Vocabularies made by hand."""

import numpy as np

from tamis.formats.strings import Strings
from tamis.formats.vocab import Vocab


def make_vocab(model, tokens, *, merges=(), scores=None, **changes):
    """A vocabulary of (text, type) pairs."""
    ids = dict.fromkeys(("bos", "eos", "eot", "eom", "unk", "pad", "sep"))
    fields = {
        "pre": "gpt-2",
        "fim": {},
        "eog": frozenset(),
        "add_bos": None,
        "add_eos": None,
        "add_space_prefix": model == "llama",
        "chat_template": None,
    }
    return Vocab(
        model=model,
        tokens=Strings.of(text for text, _ in tokens),
        token_types=np.array([kind for _, kind in tokens], np.int32),
        scores=None if scores is None else np.array(scores, np.float32),
        merges=Strings.of(merges),
        **(ids | fields | changes),
    )
