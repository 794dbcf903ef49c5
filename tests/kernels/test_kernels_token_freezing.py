"""COPY_ROWS and COPY_KV against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import F16, kept_as, normal, page_table, paged
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE

KINDS = [(16, F16), (80, F16), (64, ("q8_0", "f16")), (96, ("q8_0", "q4_0"))]
KERNELS = [(ops.COPY_ROWS, ()), *((ops.COPY_KV, (n, *types)) for n, types in KINDS)]


@pytest.mark.on_threads
@pytest.mark.parametrize("rows", [(0, 0), (0, 9), (3, 7), (8, 9)])
@pytest.mark.parametrize("n", [1, 16, 37])
@in_child
def test_rows_are_copied_and_others_stay(rows, n):
    rng = np.random.default_rng(n)
    source, target = normal(rng, 9, n), normal(rng, 9, n)
    expected = target.copy()
    expected[rows[0] : rows[1]] = source[rows[0] : rows[1]]
    for found in runs(
        ops.COPY_ROWS, out={"target": target}, rows=np.array(rows), source=source, n=n
    ):
        np.testing.assert_array_equal(found["target"], expected)


@pytest.mark.parametrize(("head_dim", "types"), KINDS, ids=str)
@pytest.mark.parametrize(("pos", "rows"), [(0, (0, 0)), (0, (0, 70)), (50, (3, 40)), (63, (0, 1))])
@in_child
def test_rows_of_the_kv_cache_are_copied_to_another_layer(head_dim, types, pos, rows):
    rng, n_head_kv, n = np.random.default_rng((head_dim, pos)), 3, 150
    tables = [page_table(rng, n, 4) for _ in range(4)]
    kept = [kept_as(normal(rng, n, n_head_kv, head_dim), type) for type in types * 2]
    k_from, v_from, k_to, v_to = (paged(*item) for item in zip(kept, tables, strict=True))
    for found in runs(
        ops.COPY_KV, (head_dim, *types), out={"k_to": k_to, "v_to": v_to}, step=step_of(100, pos),
        rows=np.array(rows), k_from=k_from, v_from=v_from, k_from_table=tables[0],
        v_from_table=tables[1], k_to_table=tables[2], v_to_table=tables[3], n_head_kv=n_head_kv,
    ):  # fmt: skip
        for name, before, after, table in zip(
            ("k_to", "v_to"), kept[:2], kept[2:], tables[2:], strict=True
        ):
            for j in range(n):
                source = before if pos + rows[0] <= j < pos + rows[1] else after
                np.testing.assert_array_equal(found[name][table[j // PAGE], :, j % PAGE], source[j])
