"""The dictionaries that Llama takes and returns, in the form of OpenAI's API."""

# ruff: noqa: F401 - the types of answers are exported

from typing import Any, Literal, NotRequired, TypedDict

from tamis.bindings.drop_in.answers import (
    ChatCompletionLogprobs,
    ChatCompletionLogprobToken,
    ChatCompletionMessageToolCall,
    ChatCompletionMessageToolCallChunk,
    ChatCompletionMessageToolCallChunkFunction,
    ChatCompletionMessageToolCallFunction,
    ChatCompletionMessageToolCalls,
    ChatCompletionResponseChoice,
    ChatCompletionResponseFunctionCall,
    ChatCompletionResponseMessage,
    ChatCompletionStreamResponseChoice,
    ChatCompletionStreamResponseDelta,
    ChatCompletionStreamResponseDeltaEmpty,
    ChatCompletionStreamResponseDeltaFunctionCall,
    ChatCompletionTopLogprobToken,
    CompletionChoice,
    CompletionLogprobs,
    CompletionUsage,
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
    CreateEmbeddingResponse,
    Embedding,
    EmbeddingUsage,
    Role,
)

JsonType = None | int | str | bool | list[Any] | dict[str, Any]

# --- messages of a chat ---------------------------------------------------------------------------

ChatCompletionRequestAssistantMessageFunctionCall = ChatCompletionResponseFunctionCall


class ChatCompletionRequestMessageContentPartText(TypedDict):
    type: Literal["text"]
    text: str


class ChatCompletionRequestMessageContentPartImageImageUrl(TypedDict):
    url: str
    detail: NotRequired[Literal["auto", "low", "high"]]


class ChatCompletionRequestMessageContentPartImage(TypedDict):
    type: Literal["image_url"]
    image_url: str | ChatCompletionRequestMessageContentPartImageImageUrl


ChatCompletionRequestMessageContentPart = (
    ChatCompletionRequestMessageContentPartText | ChatCompletionRequestMessageContentPartImage
)


class ChatCompletionRequestSystemMessage(TypedDict):
    role: Literal["system"]
    content: str | None


class ChatCompletionRequestUserMessage(TypedDict):
    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None


class ChatCompletionRequestAssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[str]
    tool_calls: NotRequired[ChatCompletionMessageToolCalls]
    function_call: NotRequired[ChatCompletionRequestAssistantMessageFunctionCall]


class ChatCompletionRequestToolMessage(TypedDict):
    role: Literal["tool"]
    content: str | None
    tool_call_id: str


class ChatCompletionRequestFunctionMessage(TypedDict):
    role: Literal["function"]
    content: str | None
    name: str


ChatCompletionRequestMessage = (
    ChatCompletionRequestSystemMessage
    | ChatCompletionRequestUserMessage
    | ChatCompletionRequestAssistantMessage
    | ChatCompletionRequestToolMessage
    | ChatCompletionRequestFunctionMessage
)

# --- functions and tools --------------------------------------------------------------------------


class _Function(TypedDict):
    name: str
    description: NotRequired[str]
    parameters: dict[str, JsonType]


class ChatCompletionFunction(_Function):
    """A function that may be called."""


class ChatCompletionFunctions(_Function):
    """A function that may be called."""


ChatCompletionFunctionParameters = dict[str, JsonType]


class ChatCompletionToolFunction(_Function):
    """A function that may be called."""


class ChatCompletionTool(TypedDict):
    type: Literal["function"]
    function: ChatCompletionToolFunction


class _Name(TypedDict):
    name: str


class ChatCompletionFunctionCallOption(_Name):
    """The function that must be called."""


class ChatCompletionRequestFunctionCallOption(_Name):
    """The function that must be called."""


ChatCompletionRequestFunctionCall = (
    Literal["none", "auto"] | ChatCompletionRequestFunctionCallOption
)


class ChatCompletionNamedToolChoiceFunction(_Name):
    """The function that must be called."""


class ChatCompletionNamedToolChoice(TypedDict):
    type: Literal["function"]
    function: ChatCompletionNamedToolChoiceFunction


ChatCompletionToolChoiceOption = Literal["none", "auto", "required"] | ChatCompletionNamedToolChoice


class ChatCompletionRequestResponseFormat(TypedDict):
    type: Literal["text", "json_object"]
    schema: NotRequired[JsonType]


# --- aliases
# ----------------------------------------------------------------------------------------

CompletionChunk = Completion = CreateCompletionStreamResponse = CreateCompletionResponse
ChatCompletion = CreateChatCompletionResponse
ChatCompletionMessage = ChatCompletionResponseMessage
ChatCompletionChoice = ChatCompletionResponseChoice
ChatCompletionChunk = ChatCompletionStreamResponse = CreateChatCompletionStreamResponse
ChatCompletionChunkChoice = ChatCompletionStreamResponseChoice
ChatCompletionChunkDelta = ChatCompletionStreamResponseDelta
ChatCompletionChunkDeltaEmpty = ChatCompletionStreamResponseDeltaEmpty
ChatCompletionResponseFunction = ChatCompletionFunction
ChatCompletionFunctionCall = ChatCompletionResponseFunctionCall

__all__ = [name for name in dir() if name.startswith(("C", "E", "JsonType"))]
