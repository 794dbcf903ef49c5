"""Drafts and their checks step by step, around a model that is a rule: no weights, no kernels."""

from types import SimpleNamespace

import numpy as np
import pytest

from tamis.engine import drafting
from tamis.engine.drafting import (
    AttentionDraft,
    Draft,
    Drafting,
    FirstDraft,
    ModelDraft,
    NextDraft,
    check_vocabulary,
)
from tamis.graph.topk_logits import Best
from tamis.select.dense import Dense

N_VOCAB, END = 40, 39
SURE = 50.0  # a logit


class Rule:
    """A session whose next token is the last one and 1; logits are of the rows that were read."""

    audited, selector = False, Dense()

    def __init__(self, n_ctx=64, n_ubatch=16, unsure=(), best=False):
        self.n_ctx, self.n_ubatch = n_ctx, n_ubatch
        self.tokens, self.asked, self.best = [], [], best
        self.unsure = set(unsure)  # after these tokens two are as likely
        self.tokenizer = SimpleNamespace(eog={END})
        self.forward = SimpleNamespace(hidden=lambda n: self.hidden[:n])
        self.hidden = np.zeros((0, 1))

    @property
    def n_past(self):
        return len(self.tokens)

    @property
    def n_free(self):
        return self.n_ctx - self.n_past

    def row(self, token):
        row = np.zeros(N_VOCAB, np.float32)
        row[min(token + 1, N_VOCAB - 1)] = SURE
        if token in self.unsure:
            row[0], row[1] = SURE, SURE
        return row

    def read(self, ids):
        assert 0 < len(ids) <= self.n_free
        assert all(0 <= token < N_VOCAB for token in ids)
        self.tokens += ids
        self.hidden = np.array(ids, np.float32)[:, None]

    def prefill(self, ids, progress=None):
        self.asked.append(("prefill", list(ids)))
        self.read(list(ids))
        return self.row(ids[-1])

    def prefill_steps(self, ids):
        for first in range(0, len(ids), self.n_ubatch):
            part = ids[first : first + self.n_ubatch]
            self.read(part)
            yield first + len(part)
        return self.row(ids[-1])

    def decode_best(self, token, n):
        self.asked.append(("decode", token, n))
        self.read([token])
        row = self.row(token)
        if not self.best:
            return row
        at = int(row.argmax())
        total = float(np.log(np.exp(row.astype(float)).sum()))
        return Best(np.array([at]), np.array([row[at]]), total)

    def logits(self, ids):
        assert len(ids) <= self.n_ubatch
        self.asked.append(("logits", list(ids)))
        self.read(list(ids))
        yield np.stack([self.row(token) for token in ids])

    def truncate(self, n):
        assert n <= self.n_past
        del self.tokens[n:]


def model_draft(session, n_vocab=N_VOCAB):
    draft = ModelDraft.__new__(ModelDraft)
    draft._session, draft._eog, draft._n_vocab = session, {END}, n_vocab
    return draft


class Listed(Draft):
    """It proposes what it has, as many as are asked for."""

    def __init__(self, tokens=(), watches=False):
        self.tokens, self.watches, self.seen, self.asked = list(tokens), watches, [], []

    def propose(self, tokens, n):
        self.asked.append((list(tokens), n))
        return self.tokens[:n]

    def saw(self, pos, rows):
        self.seen.append((pos, rows.ravel().tolist()))


# ---- a smaller model -----------------------------------------------------------------------------
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n", "unsure", "found"),
    [
        ([3, 4, 5], 3, (), [6, 7, 8]),
        ([3, 4, 5], 1, (), [6]),
        ([3, 4, 5], 0, (), []),
        ([3, 4, 36], 9, (), [37, 38, 39]),  # the end of a text is drafted, nothing after it
        ([3, 4, 5], 9, (7,), [6, 7]),
        ([3, 4, 5], 9, (5,), []),
        ([5], 2, (), [6, 7]),
    ],
)
def test_a_model_drafts_while_it_is_sure(tokens, n, unsure, found, best):
    session = Rule(unsure=unsure, best=best)
    assert model_draft(session).propose(tokens, n) == found


def test_a_model_reads_only_what_it_has_not():
    session = Rule()
    draft = model_draft(session)
    assert draft.propose([3, 4, 5], 2) == [6, 7]
    session.asked.clear()
    assert draft.propose([3, 4, 5, 6, 9], 2) == [10, 11]  # 6 was taken, 7 was not
    assert session.asked == [("decode", 9, 1), ("decode", 10, 1)]
    assert session.tokens == [3, 4, 5, 6, 9, 10]
    session.asked.clear()
    assert draft.propose([3, 4, 5, 6, 9], 1) == [10]  # its last token again, for its logits
    assert session.asked == [("decode", 9, 1)]
    session.asked.clear()
    assert draft.propose([3, 8, 1, 2], 1) == [3]
    assert session.asked == [("prefill", [8, 1, 2])]


def test_a_model_drafts_up_to_the_end_of_its_context_and_vocabulary():
    assert model_draft(Rule(n_ctx=4)).propose([1, 2, 3], 9) == [4, 5]
    assert model_draft(Rule(n_ctx=3)).propose([1, 2, 3], 9) == [4]
    assert model_draft(Rule(n_ctx=2)).propose([1, 2, 3], 9) == []
    assert model_draft(Rule(), n_vocab=6).propose([1, 2, 3], 9) == [4, 5]


class Vocabulary(list):
    def __init__(self, tokens, model="gpt2"):
        super().__init__(tokens)
        self.tokens, self.model = list(tokens), model


@pytest.mark.parametrize(("n", "other", "fits"), [(9, 9, 1), (9, 137, 1), (9, 138, 0), (137, 9, 1)])
def test_a_family_has_the_same_first_tokens(n, other, fits):
    pair = Vocabulary(range(n)), Vocabulary(range(other))
    if fits:
        check_vocabulary(*pair)
        pair[1].tokens[min(n, other) - 1] = "else"
    with pytest.raises(ValueError, match=rf"other tokens \({other}, gpt2\) than the model \({n}"):
        check_vocabulary(*pair)
    with pytest.raises(ValueError, match="other tokens"):
        check_vocabulary(Vocabulary(range(9)), Vocabulary(range(9), "llama"))


# ---- the file's own layer ------------------------------------------------------------------------
def next_draft(session):
    draft = NextDraft.__new__(NextDraft)
    draft._session, draft._eog, draft._n_sure = session, {END}, 0
    draft._rows, draft._hidden = np.zeros((64, 1)), np.zeros((64, 1), np.float32)
    return draft


@pytest.mark.parametrize(
    ("tokens", "n", "found"),
    [([3, 4, 5], 2, [6, 7]), ([3, 4, 5], 0, []), ([3], 4, []), ([], 4, []), ([3, 37], 4, [38, 39])],
)
def test_the_next_layer_reads_all_but_the_first_token(tokens, n, found):
    session = Rule()
    assert next_draft(session).propose(tokens, n) == found
    if found:
        assert session.tokens[: len(tokens) - 1] == tokens[1:]


def test_the_next_layer_reads_again_what_it_had_guessed():
    session = Rule(n_ubatch=2)
    draft = next_draft(session)
    draft.saw(0, np.array([[30.0], [31.0], [32.0], [33.0]]))
    assert draft.propose([1, 2, 3, 4], 3) == [5, 6, 7]
    assert [call for call in session.asked if call[0] == "prefill"] == [
        ("prefill", [2, 3]), ("prefill", [4]),
    ]  # fmt: skip
    np.testing.assert_array_equal(draft._hidden[:4, 0], [30, 31, 32, 33])
    session.asked.clear()
    draft.saw(3, np.array([[34.0], [35.0]]))
    assert draft.propose([1, 2, 3, 4, 5], 1) == [6]
    # Positions from 3 on were read with its own guesses of what the session makes of them.
    assert session.asked[0] == ("prefill", [5])
    session.asked.clear()
    draft.saw(1, np.array([[35.0]]))
    assert draft.propose([1, 2, 3, 4, 5], 1) == [6]
    assert session.asked[:2] == [("prefill", [3, 4]), ("prefill", [5])]


# ---- the session's own sparse attention ----------------------------------------------------------
def own_draft(session):
    draft = AttentionDraft.__new__(AttentionDraft)
    draft._session, draft._n, draft._proposed, draft._at = session, drafting.FIRST, [], 0
    return draft


def test_own_steps_are_dropped_again():
    session = Rule()
    session.tokens = [1, 2]
    assert own_draft(session).propose([1, 2, 3, 4], 3) == [5, 6, 7]
    assert session.tokens == [1, 2]
    assert session.asked == [("prefill", [3]), *(("decode", token, 1) for token in (4, 5, 6))]
    session.asked.clear()
    assert own_draft(session).propose([1, 2, 3, 4], 0) == []
    assert own_draft(session).propose([1, 2], 3) == []
    assert session.asked == []


def test_own_steps_end_where_the_text_does_or_nothing_is_sure():
    for tokens, unsure, found in (([37], (), [38, 39]), ([END], (), []), ([3], (4,), [4])):
        session = Rule(unsure=unsure)
        assert own_draft(session).propose(tokens, 4) == found
    session = Rule(n_ctx=3)
    assert own_draft(session).propose([1, 2], 4) == [3, 4]


def test_own_drafts_grow_by_two_while_all_is_taken_and_shrink_to_one_more():
    session = Rule(n_ctx=512)
    draft, text = own_draft(session), [1]
    for expected in (4, 6, 8, 10, 12, 14, 15, 15):
        found = draft.propose(text, 64)
        assert len(found) == min(expected, END - text[-1])
        text = [*text, *found]
        if text[-1] > 20:
            text = [*text, 1]  # it starts again
    draft._n = 8
    draft._proposed, draft._at = [5, 6, 7], len(text)
    draft._adapt([*text, 5, 6, 9])
    assert draft._n == 3
    draft._proposed = [5, 6, 7]
    draft._adapt([*text, 9])
    assert draft._n == 1
    draft._proposed = [5, 6, 7]
    draft._adapt(text)  # nothing came after
    assert draft._n == 1
    draft._n, draft._proposed = 8, [5]
    draft._adapt([*text, 5])
    assert draft._n == 8


# ---- the check -----------------------------------------------------------------------------------
@pytest.mark.parametrize("n_max", [0, 65, -1])
def test_a_drafts_length_is_checked(n_max):
    with pytest.raises(ValueError, match=f"draft_max is {n_max}, expected 1 to 64"):
        Drafting(Rule(), Listed(), n_max)
    for fits in (1, 64):
        Drafting(Rule(), Listed(), fits)


def test_a_draft_is_taken_as_far_as_it_is_chosen():
    session, draft = Rule(), Listed([6, 7, 9])
    checking = Drafting(session, draft, 3)
    session.prefill([4])
    np.testing.assert_array_equal(checking.decode_best(5, 1), session.row(5))
    assert draft.asked == [([4, 5], 3)]
    assert session.tokens == [4, 5, 6, 7, 9]
    assert (checking.tokens, checking.n_past, checking.n_free) == ([4, 5], 2, 62)
    for token in (6, 7):
        np.testing.assert_array_equal(checking.decode_best(token, 1), session.row(token))
    assert (checking.n_drafted, checking.n_taken) == (3, 2)
    assert checking.tokens == [4, 5, 6, 7]
    draft.tokens = []
    np.testing.assert_array_equal(checking.decode_best(8, 4), session.row(8))  # not the 9
    assert session.tokens == [4, 5, 6, 7, 8]
    assert session.asked[-1] == ("decode", 8, 4)
    draft.tokens = [1]
    checking.decode_best(2, 1)
    checking.settle()
    assert session.tokens == [4, 5, 6, 7, 8, 2]
    checking.settle()
    assert session.tokens == [4, 5, 6, 7, 8, 2]


@pytest.mark.parametrize(
    ("n_past", "how", "room"),
    [
        (1, {}, 8), (1, {"n_most": 3}, 3), (1, {"n_most": 30}, 8), (56, {}, 7), (62, {}, 1),
        (63, {}, None), (1, {"n_ubatch": 4}, 3), (1, {"n_ubatch": 1}, None), (1, {"until": 6}, 4),
        (6, {"until": 6}, None), (1, {"longest": 5}, 5), (1, {"longest": 12}, 12),
    ],
)  # fmt: skip
def test_a_draft_has_room_in_chunk_and_context(n_past, how, room):
    session, draft = Rule(n_ubatch=how.get("n_ubatch", 16)), Listed([9] * 20)
    draft.n_max = how.get("longest")
    draft.until = lambda session: how.get("until", session.n_ctx)
    session.tokens = [1] * n_past
    checking = Drafting(session, draft, 8)
    checking.n_most = how.get("n_most")
    checking.decode_best(5, 1)
    assert [n for _, n in draft.asked] == ([] if room is None else [room])


def test_a_draft_that_watches_is_shown_every_row_once():
    session, draft = Rule(n_ubatch=4), Listed([8, 9], watches=True)
    checking, told = Drafting(session, draft), []
    checking.prefill([1, 2, 3, 4, 5, 6], lambda done, total: told.append((done, total)))
    assert told == [(4, 6), (6, 6)]
    assert draft.seen == [(0, [1, 2, 3, 4]), (4, [5, 6])]
    draft.seen.clear()
    checking.decode_best(7, 1)
    assert draft.seen == [(6, [7, 8, 9])]
    draft.seen.clear()
    draft.tokens = []
    checking.decode_best(3, 1)
    assert draft.seen == [(7, [3])]


def test_a_prompt_that_fails_leaves_what_was_before():
    session, draft = Rule(n_ubatch=4), Listed(watches=True)
    checking = Drafting(session, draft)
    checking.prefill([1, 2])

    def fail(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checking.prefill([3, 4, 5, 6, 7], fail)
    assert session.tokens == [1, 2]


def test_a_draft_by_own_steps_leaves_no_step_unchecked():
    session, draft = Rule(), Listed()
    draft.own_steps = True
    checking = Drafting(session, draft)
    np.testing.assert_array_equal(checking.decode_best(5, 1), session.row(5))
    assert session.asked == [("prefill", [5])]
    assert checking.own_steps


def test_the_second_draft_is_asked_where_the_first_has_none():
    first, then = Listed([1, 2, 3]), Listed([7, 8, 9], watches=True)
    both = FirstDraft(first, then, 2)
    assert both.propose([5], 3) == [1, 2, 3]
    assert then.asked == []
    first.tokens = []
    assert both.propose([5], 3) == [7, 8]
    assert both.propose([5], 1) == [7]
    both.saw(4, np.array([[6.0]]))
    assert (first.seen, then.seen) == ([], [(4, [6.0])])
    assert (both.watches, both.own_steps, both.n_max) == (True, False, 2)
    first.n_max = 9
    assert FirstDraft(first, then, 2).n_max == 9
    assert FirstDraft(first, then, 12).n_max == 12


def test_what_is_likeliest_has_its_probability():
    row = np.log(np.array([1, 3, 4], np.float32))
    assert drafting._likeliest(row) == (2, pytest.approx(0.5))
    best = Best(np.array([2, 1]), np.log([4.0, 3.0]), float(np.log(8)))
    assert drafting._likeliest(best) == (2, pytest.approx(0.5))
    assert [
        drafting._same([1, 2, 3], b) for b in ([1, 2, 3], [1, 2], [1, 3, 3], [], [1, 2, 3, 4])
    ] == [3, 2, 1, 0, 3]
