"""Whether LFPS repeats itself after a truncation and a load."""

import numpy as np


def check_repeats(engine, attn, ids, path):
    """A loaded session starts anew: what it decodes does not depend on what it did before."""
    saved = engine.session(n_ctx=256, attn=attn)
    saved.prefill(ids)
    for token in range(10):
        saved.decode(token)
    saved.save(path)
    found = []
    for used in (False, True):
        session = engine.session(n_ctx=256, attn=attn)
        if used:
            session.prefill(ids[::-1])
            session.decode(3)
        session.load(path)
        found.append([session.decode(token) for token in range(20)])
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(*found)
