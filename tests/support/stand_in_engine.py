"""A stand-in for Engine and Session: what the command line uses of them, with a scripted answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tamis.engine.generate import Piece
from tamis.engine.memory_plan import MemoryPlan
from tamis.kv.types import KVTypes
from tamis.model.hparams import RopeScaling
from tamis.select.dense import Dense
from tamis.text.chat_template import ChatTemplate

N_VOCAB = 256


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class FakeTokenizer:
    """A token a byte of UTF-8; BOS is 1 where asked for."""

    bos, eos, eog, n_vocab = 1, 0, frozenset({0}), N_VOCAB

    def __init__(self, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, **_options: bool) -> list[int]:
        return [1] * self.add_bos + list(text.encode())

    def piece(self, token_id: int, **_options: bool) -> bytes:
        return bytes([token_id])


class FakeSession:
    """Answers "one two three"; an exception in `script` is raised in place of a piece."""

    def __init__(self, n_ctx: int, script: list[Any]) -> None:
        self.n_ctx, self.tokens, self.script, self.calls = n_ctx, [], script, []
        self.audited, self.loses_keys, self.kv_types = False, False, KVTypes()
        self.audit = SimpleNamespace(n_step=0)

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    kv_ram = kv_vram = kv_counts = mass = None
    n_ubatch, selector, has_states = 512, Dense(), True
    backend = SimpleNamespace(on_host=True)

    def truncate(self, n: int) -> None:
        del self.tokens[n:]

    def remove(self, first: int, end: int) -> None:
        del self.tokens[first:end]

    def prefill(self, ids: Any, progress: Any = None) -> Any:
        self.tokens += [int(i) for i in ids]
        return np.zeros(N_VOCAB, np.float32)

    def prefill_steps(self, ids: Any) -> Iterator[int]:
        done = 0
        try:
            while done < len(ids):
                done = min(done + 64, len(ids))
                yield done
        finally:
            self.prefill(ids[:done])

    def decode(self, token_id: int) -> Any:
        return self.prefill([token_id])

    def logits(self, ids: Any) -> Iterator[Any]:
        self.prefill(ids)
        for start in range(0, len(ids), 3):
            yield np.zeros((min(3, len(ids) - start), N_VOCAB), np.float32)

    def generate(self, ids: Any, params: Any, **options: Any) -> Iterator[Piece]:
        self.calls.append((list(ids), params, options))
        script = self.script[: options["max_tokens"]]
        self.prefill(ids)
        for i, text in enumerate(script):
            if isinstance(text, BaseException):
                raise text
            last = i == len(script) - 1
            self.tokens.append(2)
            yield Piece(text, 2, -0.5, "stop" if last else None)

    def copy(self, other: "FakeSession") -> None:
        self.tokens = list(other.tokens)

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps(self.tokens))

    def load(self, path: str) -> None:
        self.tokens = json.loads(Path(path).read_text())


class FakeEngine:
    """What the commands use of an Engine."""

    path, n_threads, places = Path("fake.gguf"), 2, ()
    backend = SimpleNamespace(kv_types=("f16", "q8_0"))

    def __init__(self, script: list[Any] | None = None) -> None:
        self.script = ["one", " two", " three"] if script is None else script
        self.tokenizer, self.chats, self.sessions = FakeTokenizer(), [], []
        self.hp = SimpleNamespace(
            n_vocab=N_VOCAB, n_layer=2, n_head_kv=2, head_dim=4, n_ctx_train=512
        )
        self.hp.rope_scaling = RopeScaling()
        self.loaded = SimpleNamespace(kv_bytes=lambda n_ctx, types: 4 * types.row_bytes(4) * n_ctx)
        self.vocab = SimpleNamespace(chat_template=TEMPLATE)
        self.chat_template = ChatTemplate(TEMPLATE)
        self.file = SimpleNamespace(tensors={"output.weight": SimpleNamespace(n_bytes=1000)})

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.chats.append([dict(m) for m in messages])
        return [3, *"".join(m["content"] for m in messages).encode(), 4]

    def encode_marked(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def memory_plan(self, _n_ctx: int, **_options: Any) -> MemoryPlan:
        return MemoryPlan(1 << 20, 2 << 20, 3 << 20, 16 << 20)

    def session(self, n_ctx: int | None = None, **_options: Any) -> FakeSession:
        self.sessions.append(FakeSession(n_ctx or 100, self.script))
        return self.sessions[-1]

    def auto_stays_dense(self) -> str:
        return ""

    def auto_least(self, _kv_vram: int | None = None) -> int:
        return 12288

    def prepared(self) -> bool:
        return False

    def close(self) -> None:
        pass
