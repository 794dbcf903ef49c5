"""KV caches of every kind against lists of rows: whatever is done with them, in any order.

No model and no kernels but that of checksums: K and V of a pass are written where kernels would
write them, to the pages of the view.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tamis.engine.loaded import LoadedModel
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.composite import CompositeKV
from tamis.kv.convert import as_rows
from tamis.kv.disk_tier import MARGIN, DiskTier
from tamis.kv.gpu_page_cache import GpuPageCache
from tamis.kv.page_store import PageStore
from tamis.kv.paged import PagedKV
from tamis.kv.types import KVOptions, KVTypes, Tier

N_LAYER, N_HEAD_KV, DIM = 2, 2, 32
N_PAGE, N_UBATCH = 7, 2 * PAGE
N_CTX = N_PAGE * PAGE - 9
TYPES = KVTypes("f16", "q8_0")
EXAMPLES, STEPS = 25, 14  # of each kind; a second or two


def hp_of(n_layer):
    return SimpleNamespace(
        n_layer=n_layer, n_head_kv=N_HEAD_KV, head_dim=DIM, latent=SimpleNamespace(n_latent=0)
    )


PAGE_BYTES = TYPES.row_bytes(DIM) * N_HEAD_KV * PAGE
N_FRAME = MARGIN + N_LAYER * 3 + 1  # one more than the least


def paged(folder, n_layer=N_LAYER):
    return PagedKV(hp_of(n_layer), N_CTX, PageStore(hp_of(n_layer), TYPES, 3 * N_PAGE))


def disk(folder, n_layer=N_LAYER, unit=16):
    tier = Tier(N_FRAME * PAGE_BYTES, folder, unit)
    return DiskTier(hp_of(n_layer), N_CTX, TYPES, tier, N_UBATCH)


def gpu(folder, n_layer=N_LAYER):
    n_frame = 1 + n_layer * 3 + 16
    return GpuPageCache(
        hp_of(n_layer), N_CTX, TYPES, n_frame * PAGE_BYTES, N_UBATCH, lambda array: array
    )


def both(folder):
    """The first layer in memory, the second in a file."""
    return CompositeKV([([0], paged(folder, 1)), ([1], disk(folder, 1, unit=64))])


KINDS = {"paged": paged, "disk": disk, "gpu": gpu, "composite": both}


def random_rows(rng, n):
    """K and V of n tokens of a layer."""
    size = (max(1, n), N_HEAD_KV, DIM)
    return [as_rows(rng.standard_normal(size), type)[:n] for type in TYPES]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class Order(RuleBasedStateMachine):
    """A cache, and the rows that it should have: of each layer K and V."""

    kind: str
    folder: Path

    @initialize(seed=st.integers(0, 1 << 30))
    def opens(self, seed):
        self.kv, self.left = KINDS[self.kind](self.folder), None
        self.rng, self.n = np.random.default_rng(seed), 0
        self.rows = [random_rows(self.rng, 0) for _ in range(N_LAYER)]
        assert self.kv.capacity == N_PAGE * PAGE

    @property
    def room(self):
        return N_CTX - self.n

    @rule(n_tok=st.integers(1, N_UBATCH))
    def passes(self, n_tok):
        """A chunk or a step. On a GPU kernels would write it: there the page is set instead."""
        n_tok = min(n_tok, self.room)
        if n_tok < 1:
            return
        if self.kind == "gpu":
            self.kv.reserve(self.n, self.n + n_tok)
            self.writes(self.n // PAGE * PAGE, n_tok + self.n % PAGE, kept=True)
            return
        first, self.n = self.n, self.n + n_tok
        self.kv.reserve(first, self.n)
        self.kv.begin(first, n_tok)
        for layer, rows in enumerate(self.rows):
            new, view = random_rows(self.rng, n_tok), self.kv.view(layer)
            for i, (pages, table) in enumerate(((view.k, view.k_table), (view.v, view.v_table))):
                at = np.arange(first, self.n)
                assert (table[at // PAGE] >= 0).all()
                pages[table[at // PAGE], :, at % PAGE] = new[i]
                rows[i] = np.concatenate([rows[i], new[i]])
        self.kv.finish(first, n_tok)

    @rule(back=st.integers(0, 3 * PAGE))
    def truncate(self, back):
        self.n = max(0, self.n - back)
        self.kv.truncate(self.n)
        self.rows = [[x[: self.n] for x in rows] for rows in self.rows]

    @rule(page=st.integers(0, N_PAGE), n=st.integers(1, 2 * PAGE))
    def write(self, page, n):
        """From a page on, as a loaded session does."""
        page = min(page, self.n // PAGE)
        n = min(n, N_CTX - page * PAGE)
        if n > 0:
            self.writes(page * PAGE, n)

    def writes(self, first, n, *, kept=False):
        """n rows anew; those that there were stay where `kept`."""
        for layer, rows in enumerate(self.rows):
            new = random_rows(self.rng, n)
            for i, old in enumerate(rows):
                if kept:
                    new[i][: self.n - first] = old[first:]
                rows[i] = np.concatenate([old[:first], new[i]])
            self.kv.write(layer, *new, *([first // PAGE] if first >= PAGE else []))
        if first + n < self.n:
            self.kv.truncate(first + n)
        self.n = first + n

    @rule(back=st.integers(0, 3 * PAGE), n_tok=st.integers(1, N_UBATCH))
    def undo(self, back, n_tok):
        """What a pass over the same positions wrote is put back."""
        first = max(0, self.n - back)
        if first == self.n:
            return
        kept, before, n = self.kv.pages_from(first), [list(rows) for rows in self.rows], self.n
        if self.kind == "gpu":
            for layer in range(N_LAYER):
                new = random_rows(self.rng, n - first // PAGE * PAGE)
                self.kv.write(layer, *new, first // PAGE)
        else:
            self.rows, self.n = [[x[:first] for x in rows] for rows in self.rows], first
            self.passes(min(n_tok, n - first))
        self.kv.put_back(first, kept)
        self.rows, self.n = before, n

    @rule(back=st.integers(0, 3 * PAGE))
    def fork(self, back):
        """Another sequence resumes here; this one is left as it is, until the next fork."""
        if self.kind != "paged":
            return
        if self.left is not None:
            self.left[0].truncate(0)
        other, n = PagedKV(hp_of(N_LAYER), N_CTX, self.kv._store), max(0, self.n - back)
        assert other.share(self.kv, n)
        self.left = self.kv, self.rows, self.n
        self.kv, self.n = other, n
        self.rows = [[x[:n] for x in rows] for rows in self.rows]

    @rule(layer=st.integers(0, N_LAYER - 1), back=st.integers(0, 3 * PAGE), page=st.integers(0, 6))
    def reads(self, layer, back, page):
        """A part of a layer, from a page on."""
        n = max(0, self.n - back)
        page = min(page, n // PAGE)
        same(self.kv.read(layer, n, page), [x[page * PAGE : n] for x in self.rows[layer]])

    @rule(layer=st.integers(0, N_LAYER - 1), seed=st.integers(0, 99))
    def fetches(self, layer, seed):
        """Units that an op asks for are where it reads them."""
        cache, layer = (self.kv, layer) if self.kind == "disk" else (None, layer)
        if self.kind == "composite" and layer == 1:
            cache, own = self.kv._caches[1], 0
        elif cache is not None:
            own = layer
        if cache is None or self.n < 1:
            return
        n_page, per = -(-self.n // PAGE), PAGE // cache._unit
        rng = np.random.default_rng(seed)
        chosen = np.zeros((n_page, N_HEAD_KV, per), bool)
        some = rng.permutation(n_page)[:3]
        chosen[some] = rng.random((len(some), N_HEAD_KV, per)) < 0.5
        cache.fetch_units(own, [chosen.reshape(n_page, -1)] * 2)
        view = cache.view(own)
        for page, h, u in zip(*np.nonzero(chosen), strict=True):
            at = np.arange(u * cache._unit, (u + 1) * cache._unit)
            at = at[at + page * PAGE < self.n]
            for pages, table, rows in zip(
                (view.k, view.v), (view.k_table, view.v_table), self.rows[layer], strict=True
            ):
                same([pages[table[page], h, at]], [rows[page * PAGE + at, h]])

    def teardown(self):
        if hasattr(self, "rows"):
            for layer in range(N_LAYER):
                same(self.kv.read(layer, self.n), self.rows[layer])
            if self.kind == "gpu":  # nothing that Python wrote over is in a frame
                assert (self.kv._table == -1).all()
                assert (self.kv._owner == -1).all()
            if self.kind == "paged":
                self.pages_are_held_once()

    def pages_are_held_once(self):
        """By the sequences that hold them, and all others are free."""
        held = set(self.kv._held)
        assert len(self.kv._held) == -(-self.n // PAGE)
        if self.left is not None:
            kv, rows, n = self.left
            for layer in range(N_LAYER):
                same(kv.read(layer, n), rows[layer])
            held |= set(kv._held)
        assert self.kv._store.pool.n_free == 3 * N_PAGE - len(held)


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_leaves_the_rows_that_were_written(tmp_path, kind):
    class OfKind(Order):
        pass

    OfKind.kind, OfKind.folder = kind, tmp_path
    run_state_machine_as_test(
        OfKind,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            phases=(Phase.generate,),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("option", ["", "tier", "vram"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_cache_is_of_the_kind_that_its_place_allows(tmp_path, option, whole, on_host):
    """A file goes with the CPU's memory, and RAM with a GPU's: a whole cache has neither."""
    backend = SimpleNamespace(on_host=on_host, mapped=lambda array: array)
    place = SimpleNamespace(backend=backend, kv_backend=backend)
    stores = SimpleNamespace(
        _page_store=lambda place, hp, types, n_page: PageStore(hp, types, n_page)
    )
    tier, n_vram = Tier(N_FRAME * PAGE_BYTES, tmp_path, 16), (1 + N_LAYER * 3 + 16) * PAGE_BYTES
    kv = KVOptions(TYPES, tier if option == "tier" else None, n_vram if option == "vram" else None)
    cache = LoadedModel._cache(stores, place, hp_of(N_LAYER), N_CTX, N_UBATCH, kv, whole=whole)
    kinds = {("tier", False, True): DiskTier, ("vram", False, False): GpuPageCache}
    assert type(cache) is kinds.get((option, whole, on_host), PagedKV)
