"""The token bank of a sequence: KV rows of single units that decode attention reads.

Attention of a method reads scattered positions, different ones for each KV head, and mostly those
of the step before. If memory holds only a part of the context, the bank keeps the most recently
used units, each a Selection's block of one KV head. Of the two caches of HiP's offloading (Lee et
al. 2024, arXiv 2406.09827, 3.3) it is the one of sparse attention, with its vector map from tokens
to slots. A Program itself fetches what the bank lacks, without stopping.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.types import KVTypes
from tamis.model.hparams import HParams
from tamis.platform.memory import huge_zeros

LEAST_UNIT = 2  # in positions, if single ones are selected


def may_serve(op: ops.Op, constants: dict[str, Any]) -> bool:
    """Whether an op has one query and reads keys at given positions."""
    return (op is ops.ATTEND and constants["q_block"] == 1) or "places" in op.fields


def least(n_ctx: int) -> int:
    """The least pages of a bank: each head has a slot for all units of a layer, in whole groups."""
    return -(-n_ctx // PAGE) + ops.BANK_GROUP + 1


class TokenBank:
    """A bank of n_page pages, in which each KV head has slots; at least `least` of the context.

    unit: positions of a slot; 0: those of the first recorded Selection.
    """

    def __init__(self, hp: HParams, n_ctx: int, types: KVTypes, n_page: int, unit: int = 0) -> None:
        self._hp, self._n_ctx, self._n_bank = hp, -(-n_ctx // PAGE) * PAGE, n_page
        assert n_page >= least(n_ctx)
        shape = (n_page, hp.n_head_kv, PAGE)
        self._banks = [huge_zeros(shape, kv_row(type, hp.head_dim))[1] for type in types]
        self._table = np.arange(n_page, dtype=np.int32)
        self._state = np.zeros(ops.BANK_STATE_SIZE, np.int64)
        self._state[ops.BANK_STATE.serial // 8] = 1
        self._row_step = np.zeros(ops.STEP_SIZE, np.int64)
        self.unit = self._n_call = 0
        self._maps: dict[str, np.ndarray] = {}
        if unit:
            self.open(unit)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays of units in the bank: to be fetched before `truncate`, and sent after it."""
        return (
            self._state,
            *(self._maps[name] for name in ("slots", "owner", "used") if self.unit),
        )

    @property
    def state(self) -> np.ndarray:
        """The counters of kernels: see ops.BANK_STATE."""
        return self._state

    @property
    def counted(self) -> tuple[int, int, int]:
        """The units found in the bank, those not found, and the bytes read from the file."""
        at = ops.BANK_STATE
        n_hit, n_miss, n_read = (int(self._state[i // 8]) for i in (at.n_hit, at.n_miss, at.n_read))
        return n_hit, n_miss, n_read

    def failed(self) -> bool:
        """Whether units read since the last call differed from what was written."""
        at = ops.BANK_STATE.n_bad // 8
        n_bad, self._state[at] = int(self._state[at]), 0
        return n_bad > 0

    @staticmethod
    def serves(program: Program, fields: dict[str, Any]) -> bool:
        """Whether an op of one query can read a bank: another op must select its positions.

        It cannot if order matters, as in a layer with a window, nor if all or the last ones are
        read.
        """
        if fields.get("window", 0) or fields.get("stride", 1) != 1:
            return False
        at = fields["indices"].ctypes.data
        named = {call.spec.op for call in program.calls if at in call.values}
        makers = {op for op in named if op.reads is not ops.READS_SELECTION}
        return bool(makers - {ops.SELECT_WINDOW})

    def fits(self, block: int) -> bool:
        """Whether blocks of so many positions are parts of its units."""
        return (self.unit or PAGE) % block == 0

    def record(
        self,
        program: Program,
        step: np.ndarray,
        op: ops.Op,
        fields: dict[str, Any],
        layer: int,
        fetch: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Record that the units an op reads are fetched.

        Returns the fields with which it reads them.

        fetch: records the op that fetches missing units, with the fields passed to it.
        """
        block, indices, scores = fields.get("block", 1), fields["indices"], "places" in op.fields
        # A layer whose candidates are scored in the bank looks units up twice in a pass.
        self._n_call = max(self._n_call, self._hp.n_layer * (2 if scores else 1))
        rows = np.zeros(len(indices), np.int32)
        maps = {name: self._maps[name] for name in ("slots", "missing", "n_missing")}
        sizes = {name: self._sizes[name] for name in ("n_head_kv", "n_unit", "n_slot", "unit")}
        common: dict[str, Any] = {
            "step": step,
            "state": self._state,
            "layer": layer,
            **maps,
            **sizes,
        }
        program.add(
            ops.BANK_LOOKUP,
            owner=self._maps["owner"],
            used=self._maps["used"],
            hands=self._maps["hands"],
            indptr=fields["indptr"],
            indices=indices,
            rows=rows,
            n_layer=self._n_call,
            n_row=fields["n_row"],
            block=block,
            **common,
        )
        k_bank, v_bank = self._banks
        fetch({**common, "k_bank": k_bank, "v_bank": v_bank})
        read = {
            "k_pages": k_bank,
            "v_pages": v_bank,
            "k_table": self._table,
            "v_table": self._table,
        }
        if scores:  # whose positions count
            read = {name: value for name, value in read.items() if name in op.fields}
            return fields | read | {"places": rows}
        return fields | read | {"indices": rows, "step": self._row_step}

    def record_begin(self, program: Program, step: np.ndarray) -> None:
        """Record, first in a pass, that the units which it will write again are dropped."""
        maps: dict[str, Any] = {name: self._maps[name] for name in ("slots", "owner", "used")}
        sizes: dict[str, Any] = {"n_layer": self._hp.n_layer, **self._sizes}
        program.add(
            ops.BANK_BEGIN,
            step=step,
            row_step=self._row_step,
            state=self._state,
            **maps,
            **sizes,
        )

    def truncate(self, n_tokens: int) -> None:
        """Drop the units that hold a position from n_tokens on."""
        if not self.unit:
            return
        slots = self._maps["slots"][:, :, n_tokens // self.unit :]
        for h in range(slots.shape[1]):
            dropped = slots[:, h][slots[:, h] >= 0]
            self._maps["owner"][h, dropped] = -1
            self._maps["used"][h, dropped] = -ops.KV_OLD
        slots[...] = -1

    def open(self, block: int) -> None:
        """Set the size of units to a block's positions, if it is not set."""
        if self.unit:
            return
        hp, unit = self._hp, max(block, LEAST_UNIT)
        n_unit, n_slot = self._n_ctx // unit, self._n_bank * PAGE // unit
        self.unit = unit
        self._sizes = {"n_head_kv": hp.n_head_kv, "n_unit": n_unit, "n_slot": n_slot, "unit": unit}
        self._maps = {
            "slots": np.zeros((hp.n_layer, hp.n_head_kv, n_unit), np.int32),
            "owner": np.zeros((hp.n_head_kv, n_slot), np.int32),
            "used": np.zeros((hp.n_head_kv, n_slot), np.int32),
            "hands": np.zeros(hp.n_head_kv, np.int64),
            "missing": np.zeros((hp.n_head_kv, n_unit), np.int32),
            "n_missing": np.zeros(hp.n_head_kv, np.int64),
        }
        self._maps["slots"][...], self._maps["owner"][...] = -1, -1
        self._maps["used"][...] = -ops.KV_OLD
