"""The contract of a selector: which cached positions take part in attention.

A method is one file: a frozen dataclass (the paper's hyperparameters) whose `open` returns the
state of one sequence. The state's hooks run while a Program is recorded: they record ops over
arrays and never read values. The defaults here are dense attention.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView, Selection, zeros

if TYPE_CHECKING:
    from tamis.model.hparams import HParams
    from tamis.select.meter import Meter

BLOCK = 64  # tokens of a block of dense attention: one page
SPAN = 256  # rows of scores are a multiple of it: see ops.SCORE_KEYS
DECODE, PREFILL = "decode", "prefill"  # the roles that a method can serve


@dataclass(frozen=True, slots=True)
class SelectorShape:
    """What a selector needs to know of the model and the session. Counts in tokens and heads.

    n_ctx is a session's context rounded up to whole pages, as marks have words of 64 tokens. Raises
    ValueError if it is not.
    """

    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ctx: int
    n_ubatch: int
    window: tuple[int, ...]  # each layer's own sliding window, 0 = full
    attention_scale: float = 0.0  # the scale of scores; 0: head_dim ** -0.5
    on_gpu: bool = False  # whether keys are selected on a GPU
    key_copy: int = 0  # bits of the copy by which methods score keys, 0: none; see key_codes.py

    def __post_init__(self) -> None:
        if self.n_ctx % PAGE:
            raise ValueError(
                f"n_ctx is {self.n_ctx}, expected a multiple of {PAGE}: round it up to whole pages"
            )

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.n_head // self.n_head_kv

    @property
    def scale(self) -> float:
        """The scale of attention scores."""
        return self.attention_scale or self.head_dim**-0.5


def with_heads(shape: SelectorShape, hp: "HParams") -> SelectorShape:
    """The shape with the heads of other hyperparameters."""
    heads = {name: getattr(hp, name) for name in ("n_head", "n_head_kv", "head_dim")}
    return dataclasses.replace(shape, **heads)


@dataclass(frozen=True, slots=True)
class Recording:
    """The Program being recorded, and what all its ops share."""

    program: Program
    step: np.ndarray  # int64 [STEP_SIZE]
    n_tok: int  # the most rows of a call
    q_block: int  # the number of queries that share a row of a Selection


class Attended(NamedTuple):
    """The queries of one call of ATTEND, their Selection, and the buffer of their output.

    partial: if few queries would leave a GPU idle, their keys are split, and this holds the output
    of each split. The number of splits never depends on the chunk, nor do the sums.
    """

    step: np.ndarray  # int64 [STEP_SIZE]: their number, the first one's position and its row in q
    stride: int  # rows, and positions, from one query to the next
    sel: Selection
    out: np.ndarray  # f32 [rows, n_head, head_dim]
    partial: np.ndarray | None = None  # f32 [rows, n_head, n_split, head_dim + 2]
    lse: np.ndarray | None = None  # f32 [rows, n_head]: the log of the sums of exponentials


class Bound(NamedTuple):
    """A bound that a paper states for one decode step of a layer; arrays f64 [n_head]."""

    name: str  # with its equation
    measured: np.ndarray
    allowed: np.ndarray
    rounding: np.ndarray | float = 0.0  # the largest float32 rounding error of `measured`
    holds_always: bool = True  # False: reported, not enforced, as its assumptions do not hold here


MAX_NUMBER = 1 << 24  # the limit of a method's parameters: the most tokens of a session


# The names that parameters share in the notation of all methods, with their meanings.
COMMON = {
    "sink": "first tokens, which always take part",
    "recent": "last tokens, which always take part",
    "budget": "tokens that a row reads, with sinks and recent ones",
    "period": "decode steps from one retrieval, or rebuilt index, to the next",
    "queries": "last queries of a prompt that a state starts from",
    "dense_layers": "first layers that stay dense",
    "rows": "what shares a set: the query heads of a group, or one head",
    "seed": "of random choices",
}


def common(name: str, default: Any, *, beside: bool = False) -> Any:
    """A field that the notation knows by a name of COMMON, too: its own name is the paper's.

    beside: the field does not include sinks and recent tokens, which the common name counts.
    """
    return dataclasses.field(default=default, metadata={"common": name, "beside": beside})


class ParameterError(ValueError):
    """A parameter of a method is out of range; `told` uses the names that the user wrote."""

    def __init__(self, values: Mapping[str, Any], expected: str) -> None:
        self.values, self.expected = values, expected
        super().__init__(self.told({}))

    def told(self, names: Mapping[str, str]) -> str:
        """The message with the values and the expectation; names: the user's name of each field."""
        values = ", ".join(f"{names.get(x, x)} is {value!r}" for x, value in self.values.items())
        expected = re.sub(r"(\w+) % (\w+) == 0", r"\1 a multiple of \2", self.expected)
        if listed := re.fullmatch(r"\w+ in \((.*)\)", expected):
            *more, last = (choice.strip(" '") for choice in listed[1].split(","))
            return f"{values}, expected {', '.join(more)} or {last}"
        words = re.split(r"(\w+)", expected)
        return f"{values}, expected {''.join(names.get(word, word) for word in words)}"


KINDS: dict[Any, tuple[Any, str]] = {  # the types of parameters, and how messages call them
    int: (int | np.integer, "a whole number"),
    float: (int | float | np.integer | np.floating, "a number"),
    str: (str, "a text"),
}


def check(method: Any, *conditions: str) -> None:
    """Raise ParameterError for the first condition that a method's parameters violate.

    conditions: Python comparisons of its fields, such as "1 <= b_sk <= b_k <= k". Checked before
    them: integers are at most MAX_NUMBER and floats are finite, as no context needs more.
    """
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    for field in dataclasses.fields(method):
        kind, expected = KINDS.get(field.type, (object, ""))
        value = values[field.name]
        if not isinstance(value, kind) or (expected and isinstance(value, bool)):
            raise ParameterError({field.name: value}, expected)
    for name, value in values.items():
        if isinstance(value, int) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ParameterError({name: value}, f"at most {MAX_NUMBER}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ParameterError({name: value}, "a finite number")
    for condition in conditions:
        code = compile(condition, "<condition>", "eval")
        # the text comes from the method's own file
        if not eval(code, {"__builtins__": {}}, values):
            raise ParameterError({name: values[name] for name in code.co_names}, condition)


class Selector(Protocol):
    """What every method is: a record of its hyperparameters, which opens states of sequences."""

    roles: ClassVar[tuple[str, ...]]  # DECODE, PREFILL or both

    def open(self, shape: SelectorShape) -> "SelectorState":
        """The state of one sequence."""
        ...


# What a method promises of a decode step's attention, the weakest first. A method that promises
# something names it in `promise`, and after it the fields that say how much.
PROMISES = {
    "none": "nothing",
    "bracket": "bounds of the mass that each head leaves out, before attention; in an audit, "
    "where keys have int8 codes, on a CPU",
    "estimate": "an estimate of the mass that each head holds, from samples; more is read where "
    "that is below the floor",
    "epsilon-delta": "heads err by more than epsilon in at most a share delta of the steps, as far "
    "as the central limit theorem holds",
    "exact": "dense attention",
}


def promise_of(method: Selector) -> dict[str, Any]:
    """What a method promises of decode steps: `kind`, one of PROMISES, and the numbers it has.

    Methods of different layers promise together what the weakest of them does.
    """
    if isinstance(method, PerRole):
        return promise_of(method.for_decode)
    if parts := getattr(method, "parts", ()):
        kinds = list(PROMISES)
        return min((promise_of(p.method) for p in parts), key=lambda x: kinds.index(x["kind"]))
    kind, *fields = getattr(method, "promise", ("none",))
    return {"kind": kind, **{name: getattr(method, name) for name in fields}}


class SelectorState:
    """Hooks in the order a layer calls them; each may record ops. Defaults: dense attention."""

    # K and V of frozen positions: the layer's own projections of the kept state ("project"), or
    # those of the layer before ("reuse"); "": nothing is frozen.
    freezing = ""
    # Whether a layer's selection depends on those of others: all must be on one device.
    sharing = False
    # Whether positions that one decode step leaves out are never read again.
    evicting = False
    # Whether its output has a part for what decode steps leave out.
    estimates = False
    # Arrays that both ops and `truncate` write: on a GPU they are copied in both directions.
    counters: tuple[np.ndarray, ...] = ()
    # Arrays that `phase` writes: on a GPU they are sent before the step.
    planned: tuple[np.ndarray, ...] = ()
    # f32 [1, n_head], which receives the log-sum-exp of a decode step's attention, for
    # `also_attend`.
    lse: np.ndarray | None = None
    # Whether it prepares data from parts of a prompt once they are complete: see `prepare`.
    prepares = False
    n_bytes = 0  # bytes of copies and lists of keys, counted in the memory plan
    meter: "Meter | None" = None  # the meter of decode steps' retained mass, if it is estimated

    def __init_subclass__(cls) -> None:
        """Refuse a state that defines hooks of an older name, which would silently be dense."""
        for old in ("decode", "prefill"):
            if callable(getattr(cls, old, None)):
                raise TypeError(f"{cls.__qualname__} has a hook {old}: rename it select_{old}")

    def __init__(self, shape: SelectorShape) -> None:
        self.shape = shape
        # One full Selection serves all layers of a Program with the same window and block. The key
        # is the Program itself: a new one may get the id of one that is gone.
        self._full: WeakKeyDictionary[Program, dict[tuple[int, int, int], Selection]]
        self._full = WeakKeyDictionary()

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Select keys for a chunk of queries, f32 q [n_tok, n_head, head_dim]."""
        return self.windowed(rec, 0, self.shape.window[layer])

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Select keys for one query token, f32 q [1, n_head, head_dim]."""
        return self.windowed(rec, 0, self.shape.window[layer])

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        """Yield the additional attention that `correct` needs, after that of the Selection's rows.

        Each one is recorded before the next is asked for.
        """
        return []

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        """Record changes of the attention output f32 [n_tok, n_head, head_dim] in place."""

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        """Record what the method learns from the attention of this call."""

    def prepare(self, rec: Recording, layer: int, kv: KVView) -> None:
        """Record the preparation of a layer's data once a part of a prompt is complete."""

    def prepare_due(self, end: int) -> bool:
        """Plan the recorded `prepare`: it runs, if due, after a chunk that ends before `end`."""
        return False

    def frozen(self, layer: int, n_prompt: int) -> range:
        """Positions whose hidden state this layer does not change, in a prompt of n_prompt tokens.

        Called before a layer runs, not while it is recorded. Positions that one layer freezes stay
        frozen in later ones.
        """
        return range(0)

    def truncate(self, n_tokens: int) -> None:
        """Drop the state of positions from n_tokens on."""

    def phase(self, step: int) -> str:
        """The name of the decode Program that step `step` replays.

        One Program is recorded per name.
        """
        return "decode"

    def prompt_phase(self, pos: int) -> str:
        """The name of the Program of chunks from position pos on.

        One Program is recorded per name.
        """
        return "prefill"

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        """Whether `sel` is the default: dense attention."""
        return sel is self._shared(rec).get((0, self.shape.window[layer], BLOCK))

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        """Record what `bounds` needs of an audited decode step; by default nothing."""

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        """The bounds that the method's paper states for an audited step; by default none.

        report: of the layer, f64 [n_head, len(ops.AUDIT)], see ops.AUDIT_HEADS.
        """
        return []

    def noted_queries(self) -> "LastQueries | None":
        """The queries that it notes for others to read; by default none."""
        return None

    @property
    def chooses(self) -> bool:
        """Whether decode attention may read less than everything."""
        return type(self).select_decode is not SelectorState.select_decode

    @property
    def n_recall(self) -> int:
        """The number of last tokens whose queries must be observed before a decode step.

        0: none.
        """
        return 0

    def everything(self, rec: Recording) -> Selection:
        """All blocks of the context, including those after a query.

        Layers of a Program share it.
        """
        shared, key = self._shared(rec), (0, -1, BLOCK)
        if key not in shared:
            shared[key] = full_selection(self.shape, rec.n_tok, rec.q_block)
        return shared[key]

    def windowed(self, rec: Recording, n_sink: int, n_recent: int, block: int = BLOCK) -> Selection:
        """The first n_sink and last n_recent positions in whole blocks; n_recent 0 = everything.

        It is recorded once per Program and reused by later layers.
        """
        shared, key = self._shared(rec), (n_sink, n_recent, block)
        if key not in shared:
            n_row = self.shape.n_head_kv
            sel = new_selection(self.shape, rec, n_row=n_row, block=block)
            rec.program.add(
                ops.SELECT_WINDOW,
                step=rec.step,
                indptr=sel.indptr,
                indices=sel.indices,
                n_row=n_row,
                q_block=rec.q_block,
                block=block,
                n_sink=n_sink,
                n_recent=n_recent,
            )
            shared[key] = sel
        return shared[key]

    def _shared(self, rec: Recording) -> dict[tuple[int, int, int], Selection]:
        """Selections that layers of this Program share, by sinks, recent positions and block."""
        return self._full.setdefault(rec.program, {})


class Steps:
    """Tells a decode step that continues the last one from one that starts anew."""

    def __init__(self, period: int = 0) -> None:
        self._period = period  # steps after which a new start is due; 0: none
        self._next = self._begin = -1

    def fresh(self, step: int) -> bool:
        """Whether decode step `step` starts anew.

        It does if it does not follow the last decode step, or if a start is due.
        """
        due = self._period > 0 and step >= self._begin + self._period
        fresh = step != self._next or due
        # Step 0 is asked for at recording, whatever the first step will be.
        self._next = step + 1 if step > 0 else -1
        if fresh:
            self._begin = step
        return fresh

    def since(self, step: int) -> int:
        """The number of steps since the last start."""
        return step - self._begin

    def truncate(self, n_tokens: int) -> None:
        """Make the next step start anew if dropped tokens were part of the last one."""
        if n_tokens < self._next:
            self._next = -1


class LastQueries:
    """The last n queries of each layer, for methods that learn from a prompt's end."""

    def __init__(self, shape: SelectorShape, n: int) -> None:
        self._shape, self._n = shape, n
        sizes = (shape.n_layer, n, shape.n_head, shape.head_dim)
        self._past = np.zeros(sizes, np.float32)
        self._past_pos = np.full((shape.n_layer, n), -1, np.int64)
        self.counters = (self._past_pos,)  # see SelectorState

    def of(self, layer: int) -> dict[str, Any]:
        """The fields of an op that reads a layer's queries."""
        return {"past": self._past[layer], "past_pos": self._past_pos[layer], "n_past": self._n}

    def record(self, rec: Recording, layer: int, q: np.ndarray) -> None:
        """Record that a call's queries are stored."""
        n_head, head_dim = self._shape.n_head, self._shape.head_dim
        rec.program.add(
            ops.LFPS_KEEP, (head_dim,), step=rec.step, q=q, n_head=n_head, **self.of(layer)
        )

    def truncate(self, n_tokens: int) -> None:
        """Drop the queries from n_tokens on."""
        self._past_pos[self._past_pos >= n_tokens] = -1

    def record_sums(
        self,
        rec: Recording,
        layer: int,
        q: np.ndarray,
        kv: KVView,
        sums: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        """Record the sums of their attention weights, f32 [n_row, capacity].

        Each row sums the n_head / n_row query heads that it stands for; scores: f32 [n_head,
        capacity].
        """
        shape = self._shape
        rec.program.add(
            ops.COLUMN_SUMS,
            (shape.head_dim, shape.group, shape.n_head // len(sums)),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            sums=sums,
            scores=scores,
            n_head_kv=shape.n_head_kv,
            capacity=sums.shape[1],
            scale=shape.scale,
            **self.of(layer),
        )

    @property
    def n_recall(self) -> int:
        """The number of last tokens to run again: the queries, but more than FEW_ROWS.

        So few rows would be multiplied as in decode steps, with other rounding than in a prompt.
        """
        return max(self._n, ops.FEW_ROWS + 1)


# phases: the first decode step after a prompt or truncate(); and all others
START, STEP = "start", "step"


class StartingState(SelectorState):
    """The state of a method whose first step starts from a prompt's last n_query queries.

    `select_decode` records the start's ops if `_phase` is START.
    """

    def __init__(self, shape: SelectorShape, n_query: int) -> None:
        super().__init__(shape)
        self._queries, self._steps = LastQueries(shape, n_query), Steps()
        self._phase = START

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        """Record that the call's queries are stored."""
        if not self.shape.window[layer]:
            self._queries.record(rec, layer, q)

    def truncate(self, n_tokens: int) -> None:
        """Drop the queries from n_tokens on.

        The next step starts anew if these were part of the last.
        """
        self._queries.truncate(n_tokens)
        self._steps.truncate(n_tokens)

    def phase(self, step: int) -> str:
        """START or STEP."""
        self._phase = START if self._steps.fresh(step) else STEP
        return self._phase

    @property
    def n_recall(self) -> int:
        """The number of tokens that a loaded context computes again for their queries."""
        return self._queries.n_recall


class WrapperState(SelectorState):
    """The state of a method of decode steps around another's: its hooks are the inner state's."""

    def __init__(self, shape: SelectorShape, inner: SelectorState) -> None:
        super().__init__(shape)
        self._inner = inner
        self.freezing, self.sharing, self.evicting = inner.freezing, inner.sharing, inner.evicting
        self.estimates = inner.estimates
        self.counters, self.planned = inner.counters, inner.planned
        self.prepares, self.n_bytes = inner.prepares, inner.n_bytes

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """See SelectorState."""
        return self._inner.select_decode(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        """See SelectorState."""
        return self._inner.also_attend(rec, layer, rows)

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        """See SelectorState."""
        self._inner.correct(rec, layer, q, kv, sel, out)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        """See SelectorState."""
        self._inner.observe(rec, layer, q, kv, sel)

    def prepare(self, rec: Recording, layer: int, kv: KVView) -> None:
        """See SelectorState."""
        self._inner.prepare(rec, layer, kv)

    def prepare_due(self, end: int) -> bool:
        """See SelectorState."""
        return self._inner.prepare_due(end)

    def truncate(self, n_tokens: int) -> None:
        """See SelectorState."""
        self._inner.truncate(n_tokens)

    def phase(self, step: int) -> str:
        """See SelectorState."""
        return self._inner.phase(step)

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        """See SelectorState."""
        return self._inner.reads_all(rec, layer, sel)

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        """See SelectorState."""
        self._inner.bracket(rec, layer, q, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        """See SelectorState."""
        return self._inner.bounds(layer, report)

    @property
    def n_recall(self) -> int:
        """The inner state's number."""
        return self._inner.n_recall


@dataclass(frozen=True, slots=True)
class PerRole:
    """One method for prompt chunks, another for decode steps."""

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)

    for_prefill: Selector
    for_decode: Selector

    def open(self, shape: SelectorShape) -> SelectorState:
        """The states of both for one sequence."""
        return _PerRoleState(shape, self.for_prefill.open(shape), self.for_decode.open(shape))


class _PerRoleState(SelectorState):
    """Each state selects and corrects in its own role; both observe all attention."""

    def __init__(
        self, shape: SelectorShape, for_prefill: SelectorState, for_decode: SelectorState
    ) -> None:
        super().__init__(shape)
        self._for_prefill, self._for_decode = for_prefill, for_decode
        self.freezing = for_prefill.freezing
        self.counters = (*for_prefill.counters, *for_decode.counters)
        self.planned, self.lse, self.meter = for_decode.planned, for_decode.lse, for_decode.meter
        self.sharing = for_prefill.sharing or for_decode.sharing
        self.evicting, self.prepares = for_decode.evicting, for_decode.prepares
        self.n_bytes = for_prefill.n_bytes + for_decode.n_bytes

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        return self._for_prefill.select_prefill(rec, layer, q, kv)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        return self._for_decode.select_decode(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        return self._serving(rec).also_attend(rec, layer, rows)

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        self._serving(rec).correct(rec, layer, q, kv, sel, out)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        for state in (self._for_prefill, self._for_decode):
            state.observe(rec, layer, q, kv, sel)

    def truncate(self, n_tokens: int) -> None:
        for state in (self._for_prefill, self._for_decode):
            state.truncate(n_tokens)

    def prepare(self, rec: Recording, layer: int, kv: KVView) -> None:
        self._for_decode.prepare(rec, layer, kv)

    def prepare_due(self, end: int) -> bool:
        return self._for_decode.prepare_due(end)

    def frozen(self, layer: int, n_prompt: int) -> range:
        return self._for_prefill.frozen(layer, n_prompt)

    def phase(self, step: int) -> str:
        return self._for_decode.phase(step)

    def prompt_phase(self, pos: int) -> str:
        return self._for_prefill.prompt_phase(pos)

    def noted_queries(self) -> LastQueries | None:
        return self._for_prefill.noted_queries()

    @property
    def chooses(self) -> bool:
        return self._for_decode.chooses

    def _serving(self, rec: Recording) -> SelectorState:
        return self._for_decode if rec.n_tok == 1 else self._for_prefill

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        self._for_decode.bracket(rec, layer, q, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        return self._for_decode.bounds(layer, report)

    @property
    def n_recall(self) -> int:
        return max(self._for_prefill.n_recall, self._for_decode.n_recall)


def new_selection(shape: SelectorShape, rec: Recording, *, n_row: int, block: int) -> Selection:
    """Buffers of a Selection that can hold every block in every row."""
    n_rows = -(-rec.n_tok // rec.q_block) * n_row
    n_block = -(-shape.n_ctx // block)
    return Selection(
        indptr=np.zeros(n_rows + 1, np.int32),
        indices=np.zeros(n_rows * n_block, np.int32),
        block=block,
        q_block=rec.q_block,
        n_row=n_row,
    )


def full_selection(shape: SelectorShape, n_query: int, q_block: int) -> Selection:
    """A Selection of all blocks of the context for up to n_query queries; no op fills it.

    ATTEND reads up to a query's position, wherever that is.
    """
    n_rows, n_block = -(-n_query // q_block) * shape.n_head_kv, -(-shape.n_ctx // BLOCK)
    return Selection(
        indptr=np.arange(n_rows + 1, dtype=np.int32) * n_block,
        indices=np.tile(np.arange(n_block, dtype=np.int32), n_rows),
        block=BLOCK,
        q_block=q_block,
        n_row=shape.n_head_kv,
    )


# The fields of an op that chooses among all keys, where COPY_CANDIDATES listed none.
ALL_KEYS: Mapping[str, Any] = dict.fromkeys(("found", "exact", "n_found"))


class BestScores:
    """Buffers for scores of keys, which all layers share, and the selection of the best.

    It makes n_row sets, each of the first n_sink positions, the last n_local ones and the n_top
    between them with the largest score of any head of the row.
    """

    def __init__(
        self, shape: SelectorShape, n_row: int, *, n_sink: int, n_local: int, n_top: int
    ) -> None:
        n_ctx = -(-shape.n_ctx // SPAN) * SPAN
        self.scores = zeros((shape.n_head, n_ctx), np.float32)
        self.maxima = zeros((shape.n_head, n_ctx // 16), np.float32)
        self._order = zeros((n_row, n_ctx), np.int32)
        self._sets = np.zeros((n_row, min(n_ctx, n_sink + n_top + n_local)), np.int32)
        self._counts = np.zeros(n_row, np.int32)
        self._kept: dict[str, Any] = {"n_sink": n_sink, "n_local": n_local, "n_top": n_top}

    def choose(self, rec: Recording, candidates: Mapping[str, Any] = ALL_KEYS) -> Selection:
        """Record the selection by the scores and maxima that an earlier op has written.

        candidates: what it is limited to, see KeyScores.
        """
        n_row, (n_head, capacity) = len(self._sets), self.scores.shape
        rec.program.add(
            ops.SELECT_BEST,
            step=rec.step,
            scores=self.scores,
            maxima=self.maxima,
            order=self._order,
            **candidates,
            sets=self._sets,
            counts=self._counts,
            n_row=n_row,
            group=n_head // n_row,
            capacity=capacity,
            set_capacity=self._sets.shape[1],
            **self._kept,
        )
        return packed(rec, self._sets, self._counts)


def packed(rec: Recording, sets: np.ndarray, counts: np.ndarray) -> Selection:
    """Record a Selection of single positions from one set per row of queries.

    sets int32 [n_row, capacity], of which counts int32 [n_row] are filled, ascending.
    """
    n_row, capacity = sets.shape
    indptr, indices = np.zeros(n_row + 1, np.int32), np.zeros(n_row * capacity, np.int32)
    rec.program.add(
        ops.SELECT_PACK,
        sets=sets,
        counts=counts,
        indptr=indptr,
        indices=indices,
        n_row=n_row,
        capacity=capacity,
    )
    return Selection(indptr=indptr, indices=indices, block=1, q_block=1, n_row=n_row)


def with_ends(
    rec: Recording,
    kept: np.ndarray,
    begin: np.ndarray,
    *,
    n_sink: int,
    capacity: int,
    owners: np.ndarray | None = None,
) -> Selection:
    """Record a Selection of sinks, kept positions and all from `begin` on: see ops.KEPT_SETS.

    kept int32 [n_row, 1 + n_keep]; with owners int32 [n_row], the row that each set belongs to.
    capacity: the most positions of a row.
    """
    n_row = len(kept) if owners is None else len(owners)
    sets, counts = np.zeros((n_row, capacity), np.int32), np.zeros(n_row, np.int32)
    rec.program.add(
        ops.KEPT_SETS,
        step=rec.step,
        kept=kept,
        begin=begin,
        owners=owners,
        sets=sets,
        counts=counts,
        n_row=n_row,
        n_keep=kept.shape[1] - 1,
        set_capacity=capacity,
        n_sink=n_sink,
    )
    return packed(rec, sets, counts)


def united(rec: Recording, shape: SelectorShape, sets: np.ndarray, counts: np.ndarray) -> Selection:
    """Record a Selection with one set per KV head: the union of its query heads' sets.

    A key is then read once for all of them, and every head attends to what any of them selected.
    """
    n_row, capacity = sets.shape
    rows_per_kv, n_word = n_row // shape.n_head_kv, -(-shape.n_ctx // 64)
    joined_capacity = min(shape.n_ctx, rows_per_kv * capacity)
    joined = np.zeros((shape.n_head_kv, joined_capacity), np.int32)
    n_joined = np.zeros(shape.n_head_kv, np.int32)
    rec.program.add(
        ops.SELECT_UNION,
        step=rec.step,
        sets=sets,
        counts=counts,
        bits=np.zeros((shape.n_head_kv, n_word), np.int64),
        joined=joined,
        n_joined=n_joined,
        rows_per_kv=rows_per_kv,
        n_head_kv=shape.n_head_kv,
        capacity=capacity,
        joined_capacity=joined_capacity,
        n_word=n_word,
    )
    return packed(rec, joined, n_joined)
