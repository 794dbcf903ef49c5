"""A session that drops its oldest tokens once it is full, around one that only counts."""

import numpy as np
import pytest

from tamis.engine.errors import ContextError
from tamis.engine.shifting import Shifting


class Counting:
    """A session of n_ctx tokens without a model; logits are the last token."""

    tokenizer = "its tokenizer"

    def __init__(self, n_ctx=10, n_ubatch=4):
        self.n_ctx, self.n_ubatch, self.tokens, self.chunks = n_ctx, n_ubatch, [], []

    @property
    def n_past(self):
        return len(self.tokens)

    def prefill(self, ids):
        assert 0 < len(ids) <= min(self.n_ubatch, self.n_ctx - self.n_past)
        self.chunks.append(len(ids))
        self.tokens += ids
        return np.array([ids[-1]], np.float32)

    def remove(self, first, end):
        del self.tokens[first:end]

    def decode_best(self, token_id, n):
        assert self.n_past < self.n_ctx
        self.tokens.append(token_id)
        return token_id, n


@pytest.mark.parametrize(("n_keep", "fits"), [(0, True), (5, True), (6, False), (-1, False)])
def test_at_most_half_of_the_context_is_kept(n_keep, fits):
    if fits:
        assert Shifting(Counting(), n_keep).n_dropped == 0
        return
    with pytest.raises(ContextError, match=f"n_keep is {n_keep}, expected at most half of n_ctx"):
        Shifting(Counting(), n_keep)


def test_a_prompt_of_any_length_is_read_in_chunks_and_the_first_tokens_stay():
    session, told = Counting(), []
    shifting = Shifting(session, 2)
    logits = shifting.prefill(list(range(23)), lambda done, total: told.append((done, total)))
    assert logits == [22]
    # Full at 10 of 23: half of the 8 that may go goes, and so on.
    assert session.chunks == [4, 4, 2, 4, 4, 4, 1]
    assert told == [(n, 23) for n in (4, 8, 10, 14, 18, 22, 23)]
    assert shifting.n_dropped == 16
    assert session.tokens == [0, 1, *range(18, 23)]
    assert shifting.tokens is session.tokens
    assert shifting.tokenizer == "its tokenizer"


def test_a_step_makes_room_only_where_there_is_none():
    session = Counting()
    shifting = Shifting(session, 1)
    session.tokens = list(range(9))
    assert shifting.decode_best(9, 3) == (9, 3)
    assert (session.n_past, shifting.n_dropped) == (10, 0)
    assert shifting.decode_best(10, None) == (10, None)
    assert session.tokens == [0, *range(5, 11)]
    assert shifting.n_dropped == 4


def test_one_token_goes_where_half_of_them_is_none():
    session = Counting(n_ctx=2)
    shifting = Shifting(session, 1)
    shifting.prefill([7, 8])
    shifting.decode_best(9, 1)
    assert session.tokens == [7, 9]


def test_an_answer_is_as_long_as_the_model_makes_it():
    assert Shifting(Counting(), 0).n_free > 1 << 60
