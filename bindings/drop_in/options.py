"""The keyword arguments of Llama's methods as types, for what checks and completes users' programs.

All but `stream`, on which the result's type depends.
"""

from typing import Any, TypedDict

from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import LogitsProcessorList, StoppingCriteriaList


class Options(TypedDict, total=False):
    """What completions and chats have in common."""

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
    """Of Llama.create_completion, beside the prompt."""

    suffix: str | None
    logprobs: int | None
    echo: bool
    stopping_criteria: StoppingCriteriaList | None


class ChatOptions(Options, total=False):
    """Of Llama.create_chat_completion, beside the messages."""

    functions: list[dict[str, Any]] | None
    function_call: str | dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: dict[str, Any] | None
    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: dict[str, Any] | None
    thinking_budget: int | None
