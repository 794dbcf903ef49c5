"""Recreates data/golden/<model>_float64.npz: ``python make_golden_float64.py [model ...]``.

Fetches the model files, needs 6 GB of memory and a minute a model. Writes

- promptN_last_logits (float32 [n_vocab]): the float64 forward's logits after N tokens;
- prompt700_next_logprob (float64 [699]): log-probability of each next token;
- ppl_chunk_nll (float64 [9]): summed over the counted half of each chunk of ppl_text.txt. This one
  runs in float32, which moves a logit by about 1e-5 and a perplexity not in its first five digits.
"""

import sys

import golden_data
import numpy as np
from golden_data import FOLDER, PPL_CHUNK, PROMPTS
from oracle import Array, Oracle, nll

from tamis.fetch import registry as models


def prompt_numbers(oracle: Oracle, ids: Array) -> dict[str, Array]:
    hidden = oracle.hidden(ids)
    last = oracle.head(hidden[[n - 1 for n in PROMPTS]])
    numbers = {
        f"prompt{n}_last_logits": row.astype(np.float32)
        for n, row in zip(PROMPTS, last, strict=True)
    }
    # In slices: all logits of Gemma's 262144 tokens would be 1.5 GB.
    steps = range(0, len(ids) - 1, 64)
    parts = [-nll(oracle.head(hidden[i:-1][:64]), ids[i + 1 :][:64]) for i in steps]
    return numbers | {f"prompt{len(ids)}_next_logprob": np.concatenate(parts)}


def ppl_numbers(oracle: Oracle, chunks: Array) -> dict[str, Array]:
    first = PPL_CHUNK // 2
    rows = slice(first, PPL_CHUNK - 1)
    sums = [nll(oracle.logits(c, rows), c[first + 1 :]).sum(dtype=np.float64) for c in chunks]
    return {"ppl_chunk_nll": np.array(sums)}


def main(names: list[str]) -> None:
    for model in names or golden_data.MODELS:
        with np.load(FOLDER / f"{model}_logits.npz") as f:
            golden = golden_data.Golden(model, dict(f), {}, {})
        oracle = Oracle.from_gguf(models.pull(golden_data.MODELS[model]))
        numbers = prompt_numbers(oracle, golden.prompt_ids(max(PROMPTS)))
        numbers |= ppl_numbers(oracle.with_dtype(np.float32), golden.ppl_chunks())
        np.savez_compressed(FOLDER / f"{model}_float64.npz", **numbers)  # type: ignore[arg-type]
        ppl = np.exp(numbers["ppl_chunk_nll"].mean() / (PPL_CHUNK // 2 - 1))
        print(f"{model}: perplexity {ppl:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
