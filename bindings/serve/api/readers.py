"""The functions that read requests, by name; they run here or in a helper process."""

from collections.abc import Callable
from typing import Any

from tamis.bindings.serve.api import anthropic, document, llamacpp, ollama, responses
from tamis.bindings.serve.body import Body, parse
from tamis.bindings.serve.errors import invalid
from tamis.bindings.serve.requests import Reader

READERS: dict[str, Callable[[Reader, Body], Any]] = {
    "chat": Reader.chat_task,
    "completion": Reader.completion_task,
    "embeddings": Reader.inputs,
    "tokenize": llamacpp.tokenize,
    "detokenize": llamacpp.detokenize,
    "llama completion": llamacpp.read_completion,
    "document": document.read,
    "rerank": llamacpp.read_rerank,
    "infill": llamacpp.read_infill,
    "template": llamacpp.apply_template,
    "count chat": llamacpp.count_chat,
    "messages": anthropic.read,
    "count messages": anthropic.count,
    "responses": responses.read,
    "count responses": responses.count,
    "ollama chat": ollama.read_chat,
    "ollama generate": ollama.read_generate,
    "ollama embed": ollama.read_embed,
}
# Never in the server's process, however small the file: parsers of files are not hardened.
APART = frozenset({"document"})


def read(name: str, reader: Reader, data: bytes) -> Any:
    """The result of READERS[name] for the body of a request. Raises ApiError."""
    try:
        return READERS[name](reader, parse(data))
    except RecursionError:
        raise invalid("the body is nested too deeply: expected fewer levels") from None
