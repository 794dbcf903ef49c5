"""Bytes and operations that methods say their ops move, for profiles, by hand.

Nothing is run: the methods are recorded for a shape of two KV heads of 16 elements in float16, each
shared by three query heads, and layers 0 and 2 without a window. Codes of keys are half as large.
"""

import numpy as np
import pytest
from recorded_ops import SHAPE, Tape

from tamis.jit_kernels.contract import ops
from tamis.select.base import SelectorShape

N_HEAD, N_KV, DIM = 6, 2, 16
KEY = 2 * DIM  # bytes
POS = 200
SIBLINGS = 4  # branches of a round of hip's search


def tape_of(text, **shape):
    return Tape(text, SelectorShape(**SHAPE | shape))


def cost_of(tape, name, phase=None, n_tok=1, pos=POS):
    """Of the op's first call in a phase, or in the last one that decode steps have."""
    program = tape.programs[phase or list(tape.programs)[-1]]
    return next(call.cost(n_tok, pos) for call in program.calls if call.spec.op.name == name)


def products(n_key, n_row=N_HEAD):
    return 2 * n_key * DIM * n_row  # a multiplication and an addition each


@pytest.mark.parametrize(("pos", "n_page"), [(199, 25), (200, 26), (207, 26)])
def test_quest_reads_two_vectors_a_page(pos, n_page):
    tape = tape_of("quest:budget=64,page=8,dense=0,sink=4,recent=8")
    expected = 2 * n_page * KEY * N_KV, 2 * products(n_page)
    assert cost_of(tape, "quest_score", pos=pos) == expected


def test_double_sparsity_reads_the_labels_of_all_keys():
    tape, n_label = tape_of("double_sparsity:budget=40,label=0.25,s=4,sink=4,recent=8"), 4
    expected = 2 * n_label * (POS + 1) * N_KV, 2 * n_label * (POS + 1) * N_HEAD
    assert cost_of(tape, "label_score") == expected


@pytest.mark.parametrize(("pos", "n_key"), [(POS, 24), (9, 10), (23, 24), (24, 24)])
def test_h2o_adds_up_what_a_row_keeps(pos, n_key):
    for rows, n_row in (("group", N_KV), ("head", N_HEAD)):
        tape = tape_of(f"h2o:budget=24,recent=0.5,sink=4,s=8,rows={rows}")
        expected = n_key * KEY * n_row, products(n_key)
        assert cost_of(tape, "column_add", pos=pos) == expected


def test_hshare_reads_keys_of_heads_that_retrieve():
    tape = tape_of("hshare:budget=40,sink=3,recent=5,period=2,rows=head")
    n_key = POS + 1 - 3 - 5
    owners = tape.state._for_decode._owners
    owners[0] = 0, 0, 2, 0, 0, 0  # two of the first KV head's query heads, none of the second's
    assert cost_of(tape, "score_codes", "start") == (n_key * KEY // 2, products(n_key, 2))
    owners[0] = range(6)
    assert cost_of(tape, "score_codes", "start") == (n_key * KEY // 2 * N_KV, products(n_key))
    assert cost_of(tape, "score_codes", "start", pos=7) == (0, 0)


def test_hshare_of_a_group_multiplies_for_all_its_heads():
    tape = tape_of("hshare:budget=40,sink=3,recent=5,period=2,rows=group")
    owners = tape.state._for_decode._owners
    owners[0], n_key = (0, 0), POS + 1 - 3 - 5
    assert cost_of(tape, "score_codes", "start") == (n_key * KEY // 2, products(n_key, 3))


def test_cpe_reads_keys_of_rows_that_retrieve():
    tape = tape_of("cpe:k=6,sink=1,local=2,s=16,phi=1,psi=1,rows=group")
    chosen, n_key = tape.state._chosen, POS + 1 - 2 - 1
    chosen[0] = -1, 3
    assert cost_of(tape, "score_codes") == (n_key * KEY // 2, products(n_key, 3))
    assert cost_of(tape, "score_codes", pos=2) == (0, 0)


def test_keys_without_codes_are_read_whole():
    tape = tape_of("hshare:budget=40,sink=3,recent=5,rows=head", key_copy=0)
    tape.state._for_decode._owners[0], n_key = range(6), POS + 1 - 3 - 5
    assert cost_of(tape, "score_keys", "start") == (n_key * KEY * N_KV, products(n_key))


@pytest.mark.parametrize(
    ("pos", "n_mean"),
    [
        (15, 0),  # no block yet that has left the window
        (143, 32),  # 32 blocks, all of them at once: as many as four a chunk
        (147, 8 + 32),  # 33 blocks: the 8 means of four blocks each, and then four for a chunk
        (15 + 4 * 128, 32 + 32),
        (15 + 4 * 132, 8 + 2 * 32),  # 132 blocks: means of 16, of 4, of 1
    ],
)
def test_hip_reads_a_level_of_means_and_then_four_a_chunk(pos, n_mean):
    tape = tape_of("hip:k=32,b_k=4,l_d=0,sink=4,local=16,rows=group", n_ctx=1024)
    n_near, mean = min(pos + 1, 4 + 16), DIM + 8
    expected = N_KV * (n_near * KEY + n_mean * mean), products(n_near + n_mean)
    assert cost_of(tape, "hip_search", pos=pos) == expected


def test_hip_searches_once_a_mask_with_every_eighth_query():
    tape = tape_of("hip:k=32,b_k=4,b_q=32,b_sq=8,l_d=0,sink=4,local=16,rows=head")
    n_mask, n_query, n_near, n_block = 2 * N_HEAD, 4, 4 + 16, (POS + 40 - 16) // 4
    n_key = n_near + n_block // 4 + SIBLINGS * 8
    n_bytes = n_near * KEY + (n_key - n_near) * (DIM + 8)
    expected = n_mask * n_bytes, n_mask * n_query * products(n_key, 1)
    assert cost_of(tape, "hip_search", "prefill", n_tok=40) == expected


@pytest.mark.parametrize(("pos", "n_chunk", "n_round"), [(18, 1, 0), (51, 8, 0), (99, 8, 2)])
def test_hip_of_centres_halves_its_chunks(pos, n_chunk, n_round):
    """(pos + 1 - local) / b_k blocks, of which the first is a sink's."""
    text = "hip:k=32,b_k=4,b_sk=2,l_d=0,sink=4,local=16,rep=centre"
    n_key = 2 * n_chunk * n_round * 2  # two branches a chunk, every second of four keys
    for rows, n_row in (("group", N_KV), ("head", N_HEAD)):
        tape = tape_of(f"{text},rows={rows}")
        expected = n_key * KEY * n_row, products(n_key)
        assert cost_of(tape, "hip_estimate", pos=pos) == expected


def test_hip_of_centres_searches_as_long_as_its_last_mask():
    tape = tape_of("hip:k=32,b_k=4,b_sk=2,b_q=32,b_sq=8,l_d=0,sink=4,local=16,rep=centre")
    oldest = POS + 32  # the second mask's first query
    n_block = (oldest + 1 - 16) // 4 - 1
    assert 32 < n_block < 64  # 8 chunks are halved three times
    n_key = 2 * 8 * 3 * 2
    expected = 2 * n_key * KEY * N_KV, 2 * 4 * products(n_key)
    assert cost_of(tape, "hip_estimate", "prefill", n_tok=40) == expected


def test_lfps_counts_the_keys_that_it_has_scanned_since():
    tape, at = tape_of("lfps:budget=0.1,sink=4,local=8,s=4,renew=16"), ops.LFPS_META
    meta = tape.state._for_decode._meta[0]
    n_table = 2 * N_KV * (201 // 4 + 4 * 201 // 16)  # bits of two tables, entries every 16th step
    assert cost_of(tape, "lfps_sets") == (n_table, 0)  # no step yet
    for n_scanned, n_step, n_key in ((90, 3, 30), (190, 5, 50)):
        meta[:, at.n_scanned // 8], meta[:, at.n_step // 8] = (n_scanned, 0), n_step
        expected = n_key * KEY + n_table, products(n_key, 3)
        assert cost_of(tape, "lfps_sets") == expected


def test_magicpig_reads_its_samples_and_the_lists_that_they_are_in():
    tape = tape_of("magicpig:K=3,L=6,dense=0,sink=4,recent=8,period=9")
    state = tape.state._for_decode
    state._begin[0] = 190  # sinks and 11 positions from there on are in every row
    state._counts[:] = 15, 15 + 5, 15 + 7, 0, 15, 15
    expected = 12 * KEY + 4 * N_HEAD * 6 * (POS >> 3), products(12, 1)
    assert cost_of(tape, "lsh_sample") == expected


def test_metered_reads_means_of_units_and_its_samples():
    tape = tape_of("metered(topk:k=24,sink=4,recent=8,rows=head):mass=0.9,samples=16")
    assert cost_of(tape, "meter_sample") == (N_HEAD * (DIM + 8) * (POS // 16), 0)
    assert cost_of(tape, "meter_weigh") == (N_HEAD * 16 * KEY, 0)


def test_a_tail_reads_the_values_of_its_first_samples_too():
    tape = tape_of("tail(topk:k=24,sink=4,recent=8,rows=head):samples=16")
    assert cost_of(tape, "meter_weigh") == (N_HEAD * 16 * KEY, 0)
    assert cost_of(tape, "tail_size") == (N_HEAD * 16 * KEY, 0)


def test_twilight_reads_the_keys_of_what_was_chosen():
    tape = tape_of("twilight(topk:k=24,sink=4,recent=8,rows=head)")
    assert cost_of(tape, "twilight_weigh") == (0, 0)  # no step yet
    program = tape.programs[list(tape.programs)[-1]]
    call = next(call for call in program.calls if call.spec.op.name == "twilight_weigh")
    indptr = program.arrays[call.values[call.spec.op.fields.index("indptr")]]
    indptr[:] = 24 * np.arange(N_HEAD + 1)
    assert cost_of(tape, "twilight_weigh") == (24 * KEY * N_HEAD, products(24))


def test_ops_that_say_nothing_cost_nothing():
    tape = tape_of("quest:budget=64,page=8,dense=0")
    assert cost_of(tape, "select_top_k") == (0, 0)
    assert np.all([call.cost(1, 9) == (0, 0) for call in tape_of("dense").programs["decode"].calls])
