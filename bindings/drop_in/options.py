"""The keyword arguments of Llama's methods as types, for type checkers and editors.

`stream` is not among them, as the result's type depends on it.
"""

from typing import Any, TypedDict

from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import LogitsProcessorList, StoppingCriteriaList


class Options(TypedDict, total=False):
    """Keyword arguments that completions and chats share."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    stop: str | list[str] | None
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    tfs_z: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    model: str | None
    logits_processor: LogitsProcessorList | None
    grammar: LlamaGrammar | None
    logit_bias: dict[int, float] | None


class CompletionOptions(Options, total=False):
    """Keyword arguments of Llama.create_completion, except the prompt."""

    suffix: str | None
    logprobs: int | None
    echo: bool
    stopping_criteria: StoppingCriteriaList | None


class ChatOptions(Options, total=False):
    """Keyword arguments of Llama.create_chat_completion, except the messages."""

    functions: list[dict[str, Any]] | None
    function_call: str | dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: dict[str, Any] | None
    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: dict[str, Any] | None
    thinking_budget: int | None
