"""What a user of tamis writes: checked by mypy --strict and pyright, never run."""

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
    whole = llm("Once", max_tokens=8, stop=["."])
    chunks = llm("Once", stream=True, temperature=0.0)
    chat = llm.create_chat_completion([{"role": "user", "content": "Hello"}], top_k=10)
    streamed = llm.create_chat_completion([{"role": "user", "content": "Hello"}], stream=True)
    text: str = whole["choices"][0]["text"] + "".join(c["choices"][0]["text"] for c in chunks)
    text += chat["choices"][0]["message"]["content"] or ""
    text += "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed)
    n: int = chat["usage"]["completion_tokens"]
    return f"{text} ({n} tokens)"


def misspell(llm: Llama) -> None:
    """Each of these is an error, which an unused comment would show not to be one."""
    llm("Once")["choises"]  # type: ignore[typeddict-item]
    llm("Once")["choices"][0]["txt"]  # type: ignore[typeddict-item]
    llm("Once", max_token=8)  # type: ignore[call-overload]
    messages = [{"role": "user", "content": "Hello"}]
    llm.create_chat_completion(messages)["choices"][0]["mesage"]  # type: ignore[typeddict-item]
    for chunk in llm.create_chat_completion(messages, stream=True):
        chunk["choices"][0]["message"]  # type: ignore[typeddict-item]
    llm.create_embedding("a")["dat"]  # type: ignore[misc]


async def listen(session: Session, ids: list[int]) -> str:
    text = ""
    async for piece in session.stream(ids, max_tokens=8):
        text += piece.text
    return text


def shorten(engine: Engine, text: str) -> str:
    settings = Settings(task=Task(n_words=80, question="What is it about?"), attn="tactic")
    return summarize(engine, text, settings).text
