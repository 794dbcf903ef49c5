"""Golden numbers of the three real models: llama.cpp's answers and the float64 forward's.

tests/data/golden/ has, for each of MODELS: ``<model>_logits.npz`` and ``<model>.json`` from
llama.cpp (CPU build, AVX2, flash attention off), ``<model>_float64.npz`` from make_golden_float64.
llama.cpp's logits are stored as float16 differences to the float64 ones: a third of the size, and
exact to 1e-4, a hundredth of their noise.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FOLDER = Path(__file__).parents[1] / "data" / "golden"
# Names here -> the short names that conftest's `model_path` and `tamis.fetch.registry.pull` take.
MODELS = {"smollm2": "smollm2", "qwen05": "qwen2.5-coder-0.5b", "gemma3": "gemma3-270m"}
PROMPTS = (64, 256, 700)  # lengths; the shorter ones are prefixes of the longest
KV_TYPES = ("f16", "f32")
PPL_CHUNK = 512


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation; margin is the top logit minus the second at each step."""

    prompt_ids: Array
    gen_ids: Array
    margin: Array


@dataclass(frozen=True)
class Golden:
    """One model's golden numbers; ``load`` fills it."""

    model: str
    llama: dict[str, Array]
    float64: dict[str, Array]
    ppl: dict[str, float]  # llama.cpp's, by kvf16_fa0, kvf32_fa0, kvf16_fa1

    def prompt_ids(self, n: int) -> Array:
        return self.llama["prompt700_ids"][:n]

    def float64_logits(self, n: int) -> Array:
        """float32 [n_vocab]: the last position's, KV not rounded."""
        return self.float64[f"prompt{n}_last_logits"]

    def llama_logits(self, n: int, kv: str = "f16") -> Array:
        return self.float64_logits(n) + self.llama[f"prompt{n}_kv{kv}_minus_float64"]

    def llama_distance(self, n: int, kv: str = "f16") -> float:
        """How far llama.cpp's last logits are from the float64 ones: the bound for the engine."""
        return rms(self.llama[f"prompt{n}_kv{kv}_minus_float64"].astype(np.float32))

    def greedy(self, i: int, kv: str = "f16") -> Greedy:
        """Continuation i of 5, 48 tokens."""
        suffix = "_kvf32" if kv == "f32" else ""
        return Greedy(
            self.llama[f"greedy{i}_prompt_ids"],
            self.llama[f"greedy{i}_gen_ids{suffix}"],
            self.llama[f"greedy{i}_margin{suffix}"],
        )

    @property
    def ppl_float64(self) -> float:
        return float(np.exp(self.float64["ppl_chunk_nll"].sum() / self.n_ppl))

    @property
    def n_ppl(self) -> int:
        """How many tokens the perplexities average over."""
        return len(self.float64["ppl_chunk_nll"]) * (PPL_CHUNK // 2 - 1)

    def ppl_chunks(self) -> Array:
        """int32 [9, 512] of ppl_text.txt; a model that adds BOS has it in place of each first id.

        Counted are the predictions made at positions 256 to 510 of each chunk.
        """
        ids = self.llama["ppl_ids"]
        chunks = ids[: len(ids) // PPL_CHUNK * PPL_CHUNK].reshape(-1, PPL_CHUNK).copy()
        if self.model == "gemma3":
            chunks[:, 0] = ids[0]
        return chunks

    def perplexity(self, session: Any) -> float:
        """A session's perplexity of ppl_chunks()."""
        total = count = 0.0
        for chunk in self.ppl_chunks():
            session.truncate(0)
            logits = np.concatenate(list(session.logits(chunk)))
            half = len(chunk) // 2
            rows = logits[half:-1].astype(np.float64)
            top = rows.max(-1)
            log_sum = top + np.log(np.exp(rows - top[:, None]).sum(-1))
            total += float((log_sum - rows[np.arange(len(rows)), chunk[half + 1 :]]).sum())
            count += len(rows)
        return math.exp(total / count)


def load(model: str) -> Golden:
    """The golden numbers of one of MODELS."""
    with np.load(FOLDER / f"{model}_logits.npz") as f:
        llama = dict(f)
    with np.load(FOLDER / f"{model}_float64.npz") as f:
        float64 = dict(f)
    ppl = json.loads((FOLDER / f"{model}.json").read_text())["ppl"]
    return Golden(model, llama, float64, ppl)


def rms(x: Array) -> float:
    """Root mean square, summed in float64."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
