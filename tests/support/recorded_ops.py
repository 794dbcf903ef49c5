"""What methods, and KV caches below them, record for a small shape: as text, nothing is run.

`python tests/support/recorded_ops.py` writes tests/data/recorded_ops anew.
"""

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from method_roles import in_its_roles

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Call, Program
from tamis.jit_kernels.contract.types import LINE, PAGE, KVView, Selection, zeros
from tamis.kv.cache import KVCache
from tamis.kv.composite import CompositeKV
from tamis.kv.disk_tier import MARGIN, DiskTier
from tamis.kv.gpu_page_cache import GpuPageCache
from tamis.kv.page_store import PageStore
from tamis.kv.paged import PagedKV
from tamis.kv.types import KVTypes, Tier
from tamis.select.base import Attended, Recording, Selector, SelectorShape, SelectorState
from tamis.select.notation import parse_methods

FOLDER = Path(__file__).parents[1] / "data" / "recorded_ops"
N_PROMPT, N_CTX, N_UBATCH, Q_BLOCK = 200, 576, 64, 16
# Of each method what its branches need.
TEXTS = {
    "auto": ["auto:least=0,part=8,mass=0.3", "auto:least=576"],
    "beyond": ["beyond(window:sink=4,recent=32,block=16):least=64"],
    "bigbird": ["bigbird:block=16,sink=16,recent=32,random=32,seed=2"],
    "cpe": [
        "cpe:k=6,sink=1,local=2,r=1,s=16,tau=-1,rows=group,psi=1",
        "cpe:k=24,sink=4,local=8,s=4,rows=head",
        "cpe:k=24,sink=4,local=8,r=3",
        "cpe:s=0,sink=4,local=8,alpha=2",
    ],
    "delta": ["delta(window:sink=4,recent=32,block=16):gamma=7", "delta(dense):mode=recompute"],
    "dense": ["dense"],
    "double_sparsity": [
        "double_sparsity:budget=40,sink=4,recent=8,s=4",
        "double_sparsity:budget=90,label=0.5,rows=head",
    ],
    "h2o": ["h2o:budget=40,sink=4,s=8", "h2o:budget=50,recent=0.25,rows=head"],
    "hip": [
        "hip:k=32,b_k=4,b_sk=2,r_m=4,l_d=1,sink=4,local=16,rows=group",
        "hip:k=32,b_k=4,l_d=0,sink=4,local=16,rep=centre,rows=head",
        "hip:k=8,b_k=2,r_m=8,l_d=0,sink=0,local=1,span=6",
    ],
    "hshare": [
        "hshare:budget=40,layers=0.5,heads=0.3,period=5,sink=0,recent=1",
        "hshare:budget=90,sink=3,recent=9,rows=group",
    ],
    "hyperattention": [
        "hyperattention:block=16,sample=9,recent=8,size=8,bits=3",
        "hyperattention:block=600,size=20,l_d=1,sink=600,seed=3",
    ],
    "lfps": [
        "lfps:budget=0.1,sink=4,local=8,s=4",
        "lfps:epsilon=0.1,local=8,rows=head,renew=1",
        "lfps:a=0,budget=0.001,sink=0,local=1,bypass=none",
        "lfps:bypass=mean,r=0.5",
    ],
    "magicpig": [
        "magicpig:K=3,L=6,dense=0,sink=4,recent=8,period=9",
        "magicpig:K=4,L=8,sink=600,seed=3",
    ],
    "metered": [
        "metered(topk:k=24,sink=4,recent=8,rows=head):mass=0.9,samples=16,seed=3",
        "metered(magicpig:K=3,L=6,dense=0):mass=0",
        "metered(window:sink=4,recent=32,block=16)",
    ],
    "tail": [
        "tail(topk:k=24,sink=4,recent=8,rows=head):epsilon=0.2,samples=16,seed=3",
        "tail(magicpig:K=3,L=6,dense=0):bound=parts,even=0.3",
        "tail(window:sink=4,recent=32,block=16)",
    ],
    "twilight": [
        "twilight(topk:k=24,sink=4,recent=8):p=0.8",
        "twilight(magicpig:K=3,L=6,dense=0)",
        "twilight(dense)",
    ],
    "retroinfer": ["retroinfer", "retroinfer:c=4,retrieve=0.1,estimate=0,seed=2"],
    "double_p": ["double_p", "double_p:p1=0.5,p2=0,c=8"],
    "per_layer": [
        "topk:k=24@0+lfps:budget=0.1,s=4@2",
        "h2o:budget=40@0-1+hshare:budget=90@2",
        "tactic:c=4,n_iter=1@2",
    ],
    "quest": [
        "quest:budget=64,page=8,dense=1,sink=4,recent=8",
        "quest:budget=64,page=5,dense=0,rows=group",
    ],
    "snapkv": [
        "snapkv:budget=40,window=8,sink=4",
        "snapkv:budget=60,window=8,ada=0.8,beta=20,pool=mean,kernel=3,rows=head",
    ],
    "tactic": [
        "tactic:c=4,n_iter=2,period=16,local=8",
        "tactic:P=0.5,c=4,n_iter=2,local=8,rows=head,seed=3",
        "tactic:c=4,n_iter=1,local=8,rows=joint,sample=16",
        "tactic:c=4,n_iter=1,segment=64,outside=apart",
    ],
    "topk": ["topk:k=24,sink=4,recent=8", "topk:k=24,rows=head"],
    "vertical_slash": [
        "vertical_slash:n_vertical=20,n_slash=12,sink=4,local=8,last_q=16",
        "vertical_slash(window:recent=9):l_d=1",
    ],
    "window": ["window:sink=4,recent=32,block=16"],
}
ON_GPU = ("cpe", "hip", "tactic", "topk")  # the first text of these is recorded for one, too
SHAPE: dict[str, Any] = {
    "n_layer": 3, "n_head": 6, "n_head_kv": 2, "head_dim": 16, "n_ctx": N_CTX,
    "n_ubatch": N_UBATCH, "window": (0, 32, 0), "key_copy": 8,
}  # fmt: skip


# KV caches in several tiers, with methods of which each asks them for other things.
CACHES = {
    "gpu": ["quest:budget=64,page=8,dense=1", "window:sink=4,recent=32,block=16"],
    "gpu_bank": ["quest:budget=64,page=8,dense=0", "lfps:budget=0.1,sink=4,local=8,s=4"],
    "disk": ["lfps:budget=0.1,sink=4,local=8,s=4", "hip:k=32,b_k=4,l_d=0", "dense"],
    "composite": ["quest:budget=64,page=8,dense=1"],
}
HP = SimpleNamespace(n_layer=3, n_head_kv=2, head_dim=16, latent=SimpleNamespace(n_latent=0))
TYPES = KVTypes()
PAGE_BYTES = TYPES.row_bytes(16) * 2 * PAGE


class Tape:
    """A method's state and what it records, in lines; cache: that it reads, None: one in memory."""

    def __init__(self, text: str, shape: SelectorShape, cache: KVCache | None = None) -> None:
        self.shape, self.text, self._cache = shape, text, cache
        self.state: SelectorState = methods_of(text).open(shape)
        self.programs: dict[str, Program] = {}
        n_page = shape.n_ctx // PAGE
        k, v = (zeros((n_page, shape.n_head_kv, PAGE, shape.head_dim), np.float16) for _ in "kv")
        table = np.zeros(n_page, np.int32)
        self._kv = KVView(k, v, table, table)
        self._step = np.zeros(ops.STEP_SIZE, np.int64)
        row = (N_UBATCH, shape.n_head, shape.head_dim)
        self._q, self._out = np.zeros(row, np.float32), np.zeros(row, np.float32)
        self._names: dict[int, str] = {}  # of arrays that own their memory
        self._scratch = np.zeros(1, np.uint8)
        named = {"k": k, "v": v, "table": table, "step": self._step, "q": self._q, "out": self._out}
        for name, array in named.items():
            self._names[_start(array)] = name
        self._first: dict[str, str] = {}  # by name: how it was written first
        self._kept: list[np.ndarray] = []
        self.lines: list[str] = []
        for pos in (0, N_CTX - N_UBATCH):
            self._record(self.state.prompt_phase(pos), N_UBATCH)
        if self.state.prepares:
            program = self._program()
            rec = Recording(program, self._step, N_UBATCH, Q_BLOCK)
            for layer in range(shape.n_layer):
                self.state.prepare(rec, layer, self._view(layer))
            self.lines += ["prepare:", *(self._said(program, call) for call in program.calls)]
            self.programs["prepare"] = program
        for pos in range(N_PROMPT, N_PROMPT + 3):
            self._record(self.state.phase(pos), 1)
        self.lines.insert(0, self._about())
        self.lines += self._lived()

    def _lived(self) -> list[str]:
        """The phases of steps, some of them dropped, and what is dropped of counters and plans."""
        state, lines = methods_of(self.text).open(self.shape), list[str]()
        for begin, n_step, n_kept in ((200, 20, 210), (210, 3, 64), (65, 3, 65), (65, 2, 0)):
            phases = [state.phase(pos) for pos in range(begin, begin + n_step)]
            due = [int(state.prepare_due(pos)) for pos in (begin, begin + 64)]
            for array in state.counters:
                array[...] = np.arange(begin - array.size + 1, begin + 1).reshape(array.shape)
            state.truncate(n_kept)
            left = [
                " ".join(map(str, array.ravel())) for array in (*state.counters, *state.planned)
            ]
            lines.append(f"from {begin}: {' '.join(phases)}; due {due}; {n_kept} kept: {left}")
        return lines

    def _about(self) -> str:
        """What a session asks of the state, beside its hooks."""
        state = self.state
        names = "freezing", "sharing", "evicting", "prepares", "n_bytes", "n_recall", "chooses"
        asked = " ".join(f"{name}={getattr(state, name)}" for name in names)
        arrays = [*state.counters, *state.planned, *([] if state.lse is None else [state.lse])]
        return f"{asked} {' '.join(map(self._array, arrays))}".rstrip()

    def _record(self, phase: str, n_tok: int) -> None:
        if phase in self.programs:
            return
        program = self.programs[phase] = self._program()
        rec = Recording(program, self._step, n_tok, 1 if n_tok == 1 else Q_BLOCK)
        if self._cache is not None:
            self._cache.record_begin(program, self._step)
            self.lines += [f"{phase}:", *(self._said(program, call) for call in program.calls)]
        for layer in range(self.shape.n_layer):
            self._layer(rec, layer, f"{phase} {layer}")
        if self._cache is not None:
            n = len(program)
            self._cache.record_end(program, self._step)
            self.lines += [f"end of {phase}, stops {self._cache.stops(program)}:"]
            self.lines += [self._said(program, call) for call in program.calls[n:]]

    def _program(self) -> Program:
        return Program() if self._cache is None else self._cache.program(self._step)

    def _view(self, layer: int) -> KVView:
        return self._kv if self._cache is None else self._cache.view(layer)

    def _attend(self, rec: Recording, layer: int, sel: Selection) -> None:
        """Record attention, which a cache is asked for, too."""
        kv, shape = self._view(layer), self.shape
        group = shape.n_head // sel.n_row
        rec.program.add(
            ops.ATTEND, (shape.head_dim, group, sel.q_block, *kv.types), step=rec.step, q=self._q,
            k_pages=kv.k, v_pages=kv.v, k_table=kv.k_table, v_table=kv.v_table, indptr=sel.indptr,
            indices=sel.indices, log_weight=sel.log_weight, block=sel.block, n_row=sel.n_row,
            heads_per_kv=shape.group, n_head_kv=shape.n_head_kv, window=shape.window[layer],
            n_split=1, stride=1, partial=None, out=self._out, lse=None, scratch=self._scratch,
            scale=shape.scale,
        )  # fmt: skip

    def _layer(self, rec: Recording, layer: int, title: str) -> None:
        """The hooks in the order in which a layer calls them."""
        state, q, out, kv = self.state, self._q[: rec.n_tok], self._out, self._view(layer)
        calls, n = rec.program.calls, len(rec.program)
        choose = state.select_decode if rec.n_tok == 1 else state.select_prefill
        sel = choose(rec, layer, q, kv)
        rows = Attended(rec.step, 1, sel, out, lse=state.lse)
        self.lines.append(f"{title}: {self._chosen(sel)}")
        if self._cache is not None:
            self._attend(rec, layer, sel)
        for again in state.also_attend(rec, layer, rows):
            self.lines += [self._said(rec.program, call) for call in calls[n:]]
            n, extra = len(calls), self._chosen(again.sel)
            self.lines.append(f"  attend {extra} out={self._array(again.out)}")
        state.correct(rec, layer, q, kv, sel, out)
        state.observe(rec, layer, q, kv, sel)
        if rec.n_tok == 1:  # as in a step that is audited
            state.bracket(rec, layer, q, sel)
        self.lines += [self._said(rec.program, call) for call in calls[n:]]

    def _chosen(self, sel: Selection) -> str:
        weights = "" if sel.log_weight is None else f" {self._array(sel.log_weight)}"
        arrays = f"{self._array(sel.indptr)} {self._array(sel.indices)}{weights}"
        return f"{arrays} block={sel.block} q_block={sel.q_block} n_row={sel.n_row}"

    def _said(self, program: Program, call: Call) -> str:
        constants = ",".join(map(str, call.spec.constants))
        values = zip(call.spec.op.fields, call.values, strict=True)
        fields = " ".join(
            f"{name}={self._array(program.arrays[x]) if x in program.arrays else self._number(x)}"
            for name, x in values
        )
        return f"  {call.spec.op.name}({constants}) {fields}"

    @staticmethod
    def _number(x: float) -> str:
        return f"{x:.6g}" if isinstance(x, float) else str(x)

    def _array(self, array: np.ndarray) -> str:
        """A name for the memory, with the place in it and the shape where they are new."""
        start = _start(array)
        name = self._names.setdefault(start, f"a{len(self._names)}")
        self._kept.append(array)  # another one is not to get its address
        size = "x".join(map(str, array.shape))
        at = array.ctypes.data - start
        said = f"{name}[{f'{at}:' if at else ''}{size}:{array.dtype.str[1:]}]"
        if self._first.get(name) == said:
            return name
        self._first.setdefault(name, said)
        return said


def _start(array: np.ndarray) -> int:
    """Where the memory begins that an array is in, or the first whole cache line of `zeros`."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = int(owner.ctypes.data)
    aligned = owner.dtype == np.uint8 and owner.nbytes > array.nbytes
    return -(-start // LINE) * LINE if aligned else start


def cache_of(kind: str, folder: Path) -> KVCache:
    """An empty cache of this kind."""
    ring = HP.n_layer * (1 + N_UBATCH // PAGE)
    n_page = N_CTX // PAGE
    if kind.startswith("gpu"):
        n_frame = 1 + ring + 16 + (0 if kind == "gpu" else 48)
        cache = GpuPageCache(HP, N_CTX, TYPES, n_frame * PAGE_BYTES, N_UBATCH, lambda x: x)
        cache.expect(choosing=kind == "gpu_bank")
        return cache
    if kind == "disk":
        n_frame = ring + MARGIN + 2 * n_page + 30
        return DiskTier(HP, N_CTX, TYPES, Tier(n_frame * PAGE_BYTES, folder, 16), N_UBATCH)
    own = SimpleNamespace(**vars(HP) | {"n_layer": 2})
    one = SimpleNamespace(**vars(HP) | {"n_layer": 1})
    memory = PagedKV(one, N_CTX, PageStore(one, TYPES, n_page))
    n_frame = 1 + 2 * (1 + N_UBATCH // PAGE) + 16
    cache = GpuPageCache(own, N_CTX, TYPES, n_frame * PAGE_BYTES, N_UBATCH, lambda x: x)
    return CompositeKV([([1], memory), ([0, 2], cache)])


def recorded_cache(kind: str, folder: Path) -> str:
    """All that the methods beside a kind of cache record over one."""
    lines = list[str]()
    for text in CACHES[kind]:
        cache = cache_of(kind, folder)
        lines += [f"== {text}", *Tape(text, SelectorShape(**SHAPE), cache).lines]
        if isinstance(cache, DiskTier):
            lines = [re.sub(r"handle=\d+", "handle=its", line) for line in lines]
    return "\n".join(lines) + "\n"


def methods_of(text: str) -> Selector:
    """The method wherever it serves, dense attention elsewhere."""
    roles = in_its_roles(text)
    return parse_methods(roles["attn"], roles["prefill"])


def recorded(name: str) -> str:
    """All that a method's texts record, beginning with each text."""
    lines = list[str]()
    for text in TEXTS[name]:
        lines += [f"== {text}", *Tape(text, SelectorShape(**SHAPE)).lines]
    if name in ON_GPU:
        shape = SelectorShape(**SHAPE | {"on_gpu": True, "key_copy": 4})
        lines += [f"== {TEXTS[name][0]} on a GPU", *Tape(TEXTS[name][0], shape).lines]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in TEXTS:
        (FOLDER / f"{name}.txt").write_text(recorded(name))
    with tempfile.TemporaryDirectory() as folder:
        for kind in CACHES:
            (FOLDER / f"kv_{kind}.txt").write_text(recorded_cache(kind, Path(folder)))
