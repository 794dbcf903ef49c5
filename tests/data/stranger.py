"""What a user of tamis writes: checked by mypy --strict and pyright, never run."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tamis import Engine, Llama, NumpySelector, SamplerParams, Session, Settings, Task, summarize


def ask(path: str, question: str) -> str:
    with Engine.load(path, n_threads=2) as engine, engine.session(n_ctx=4096) as session:
        ids: list[int] = engine.encode_chat([{"role": "user", "content": question}])
        pieces = session.generate(ids, SamplerParams(temp=0.7, seed=1), max_tokens=32)
        return "".join(piece.text for piece in pieces)


def compare(engine: Engine, base: Session, token: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for method in ("dense", "tactic", NumpySelector(lambda q, k: np.arange(len(k)))):
        session = engine.session(n_ctx=base.n_ctx, attn=method, audit=1)
        session.copy(base)
        logits: np.ndarray = session.decode(token)
        read = session.selected(0)
        mask: np.ndarray = read.mask
        first: np.ndarray = read.positions[0]
        found[str(method)] = session.audit.total().mass + float(logits[0]) * 0
        assert mask.shape[1] > first[-1]
    return found


def complete(llm: Llama) -> str:
    whole: dict[str, Any] = llm("Once", max_tokens=8, stop=["."])
    chunks: Iterator[dict[str, Any]] = llm("Once", stream=True, temperature=0.0)
    chat = llm.create_chat_completion([{"role": "user", "content": "Hello"}], top_k=10)
    streamed = llm.create_chat_completion([{"role": "user", "content": "Hello"}], stream=True)
    text: str = whole["choices"][0]["text"] + "".join(c["choices"][0]["text"] for c in chunks)
    return text + str(chat["choices"][0]) + "".join(str(chunk) for chunk in streamed)


def shorten(engine: Engine, text: str) -> str:
    settings = Settings(task=Task(n_words=80, question="What is it about?"), attn="tactic")
    return summarize(engine, text, settings).text
