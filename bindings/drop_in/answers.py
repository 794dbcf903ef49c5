"""The dictionaries that Llama's methods return, in the form of OpenAI's API.

A key that is not theirs is an error for type checkers.
"""

from typing import Literal, NotRequired, TypedDict

Role = Literal["system", "user", "assistant", "tool"]

# --- embeddings and completions -------------------------------------------------------------------


class EmbeddingUsage(TypedDict):
    """The tokens of embedded texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """The embedding of a text, or of each of its tokens."""

    index: int
    object: str
    embedding: list[float] | list[list[float]]


class CreateEmbeddingResponse(TypedDict):
    """The answer of create_embedding."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class CompletionLogprobs(TypedDict):
    """The logprobs of a completion's tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """The text of a completion."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionUsage(TypedDict):
    """The tokens of a prompt and its answer; attention: see Mass.rounded, if it is measured."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    attention: NotRequired[dict[str, float]]


class CreateCompletionResponse(TypedDict):
    """The answer of create_completion, or a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[CompletionUsage]


# --- calls of tools -------------------------------------------------------------------------------


class _Call(TypedDict):
    name: str
    arguments: str


class ChatCompletionResponseFunctionCall(_Call):
    """The name of a called function, and its arguments as JSON."""


class ChatCompletionMessageToolCallFunction(_Call):
    """The name of a called function, and its arguments as JSON."""


class ChatCompletionStreamResponseDeltaFunctionCall(_Call):
    """The name of a called function, and its arguments as JSON."""


class ChatCompletionMessageToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ChatCompletionMessageToolCallFunction


ChatCompletionMessageToolCalls = list[ChatCompletionMessageToolCall]

# --- answers of a chat ----------------------------------------------------------------------------


class _Logprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionTopLogprobToken(_Logprob):
    """A token and its logprob."""


class ChatCompletionLogprobToken(_Logprob):
    """A token of an answer with its logprob, and the likeliest others."""

    top_logprobs: list[ChatCompletionTopLogprobToken]


class ChatCompletionLogprobs(TypedDict):
    """The logprobs of a chat's answer."""

    content: list[ChatCompletionLogprobToken] | None
    refusal: list[ChatCompletionLogprobToken] | None


class ChatCompletionResponseMessage(TypedDict):
    """The message of the assistant; reasoning_content: its thoughts."""

    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[ChatCompletionMessageToolCalls]
    role: Literal["assistant", "function"]
    function_call: NotRequired[ChatCompletionResponseFunctionCall]


class ChatCompletionResponseChoice(TypedDict):
    """The answer of a chat, and why it ended."""

    index: int
    message: ChatCompletionResponseMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class CreateChatCompletionResponse(TypedDict):
    """The answer of create_chat_completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: CompletionUsage


class ChatCompletionMessageToolCallChunkFunction(TypedDict):
    """A function's name, and the next part of its arguments."""

    name: str | None
    arguments: str


class ChatCompletionMessageToolCallChunk(TypedDict):
    """The next part of a call."""

    index: int
    id: NotRequired[str]
    type: Literal["function"]
    function: ChatCompletionMessageToolCallChunkFunction


class ChatCompletionStreamResponseDeltaEmpty(TypedDict):
    """The delta of a stream's last chunk."""


class ChatCompletionStreamResponseDelta(TypedDict):
    """What a chunk adds to the message."""

    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    function_call: NotRequired[ChatCompletionStreamResponseDeltaFunctionCall | None]
    tool_calls: NotRequired[list[ChatCompletionMessageToolCallChunk] | None]
    role: NotRequired[Role | None]


class ChatCompletionStreamResponseChoice(TypedDict):
    """A chunk's delta, and why the answer ended."""

    index: int
    delta: ChatCompletionStreamResponseDelta
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    logprobs: NotRequired[ChatCompletionLogprobs | None]


class CreateChatCompletionStreamResponse(TypedDict):
    """A chunk of a streamed chat."""

    id: str
    model: str
    object: Literal["chat.completion.chunk"]
    created: int
    choices: list[ChatCompletionStreamResponseChoice]
