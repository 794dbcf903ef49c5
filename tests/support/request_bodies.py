"""A right body of each kind of request, with all fields that are read, and what may stand there."""

import copy
from collections.abc import Iterator
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "required": ["a"],
        },
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
MSG = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "x", "tool_calls": [CALL], "reasoning_content": "t"},
    {"role": "tool", "tool_call_id": "1", "content": "r", "name": "f"},
]
COMMON = {
    "max_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["a"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logit_bias": {"3": 1.0},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "lora": [{"id": 0, "scale": 1.0}],
    "cache_salt": "x",
    "id_slot": 0,
    "cache_prompt": True,
    "samplers": ["top_k"],
    "dry_sequence_breakers": ["a"],
    "dry_multiplier": 0.5,
    "mirostat": 0,
    "typical_p": 1.0,
    "xtc_probability": 0.1,
    "model": "m",
    "user": "u",
    "metadata": {"a": "b"},
    "timings_per_token": True,
    "return_progress": True,
    "n_keep": 1,
    "context_shift": False,
    "ignore_eos": True,
    "repeat_penalty": 1.1,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object"}},
    },
}
BODIES = {
    "chat": COMMON
    | {
        "messages": MSG,
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [TOOL]},
        },
        "functions": [TOOL["function"]],
        "function_call": {"name": "f"},
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "reasoning_budget": 5,
        "json_schema": {"type": "object"},
        "grammar": 'root ::= "a"',
        "parse_tool_calls": True,
        "verbose": True,
        "reasoning_format": "auto",
        "continue_final_message": False,
    },
    "completion": COMMON
    | {
        "prompt": ["a", [1, 2], {"prompt_string": "x"}],
        "echo": True,
        "logprobs": 2,
        "best_of": 1,
    },
    "llama completion": COMMON
    | {
        "prompt": ["a", [1, 2]],
        "n_predict": 2,
        "n_probs": 2,
        "response_fields": ["content"],
        "return_tokens": True,
        "post_sampling_probs": True,
    },
    "infill": COMMON
    | {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "x", "text": "y"}],
        "prompt": "c",
    },
    "embeddings": {
        "input": ["a", [1, 2]],
        "content": "x",  # where input is missing
        "encoding_format": "float",
        "dimensions": 32,
        "embd_normalize": 2,
    },
    "tokenize": {"content": "abc", "add_special": True, "parse_special": True, "with_pieces": True},
    "detokenize": {"tokens": [1, 2, 3]},
    "document": {"name": "a.html", "data": "PGgxPmEgd29yZA=="},
    "rerank": {
        "query": "a",
        "documents": ["b", {"text": "c"}],
        "texts": ["x"],
        "top_n": 1,
        "return_documents": True,
    },
    "template": {"messages": MSG, "tools": [TOOL]},
    "count chat": {"messages": MSG, "tools": [TOOL]},
    "messages": {
        "model": "m",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [{"type": "text", "text": "a"}],
                        "is_error": True,
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "stop_sequences": ["a"],
        "metadata": {"user_id": "u"},
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.5,
        "stream": True,
        "output_config": {
            "effort": "low",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
    },
    "responses": {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [],
            },
            {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "i"},
            {"type": "local_shell_call", "call_id": "3", "action": {"command": ["ls"]}},
        ],
        "instructions": "i",
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "custom", "name": "c", "format": {"type": "text"}},
            {"type": "local_shell"},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "max_output_tokens": 3,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
        "temperature": 0.1,
    },
    "ollama chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": "a", "images": []},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                "thinking": "t",
            },
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [TOOL],
        "format": {"type": "object"},
        "options": {"num_predict": 2, "temperature": 0.1, "stop": ["a"], "seed": 1, "top_k": 2},
        "think": True,
        "stream": True,
        "keep_alive": "5m",
    },
    "ollama generate": {
        "model": "m",
        "prompt": "a",
        "system": "s",
        "raw": True,
        "format": "json",
        "options": {"num_predict": 2},
        "think": "low",
        "stream": False,
        "keep_alive": 5,
    },
    "ollama embed": {
        "model": "m",
        "input": ["a"],
        "prompt": "b",
        "truncate": True,
        "options": {},
        "dimensions": 3,
    },
}
BODIES["count messages"] = BODIES["messages"]
BODIES["count responses"] = BODIES["responses"]
VALUES = [
    None,
    [],
    {},
    [5],
    [None],
    {"a": 1},
    {"name": []},
    "",
    "x" * 5000,
    5,
    -1,
    1.5,
    True,
    10**30,
    [[]],
    [{}],
    {"type": []},
    {"type": {}},
    "\ud800",
    ["a"],
    {"type": "function"},
    {"function": 5},
    {"tools": [5]},
    [{"type": "function", "function": {"name": "f"}}],
]


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value, the whole one first."""
    yield at
    parts = value.items() if isinstance(value, dict) else []
    for key, part in enumerate(value) if isinstance(value, list) else parts:
        yield from paths(part, (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The value with another part in place of one."""
    if not at:
        return new
    value = copy.copy(value)
    value[at[0]] = put(value[at[0]], at[1:], new)
    return value


def wrong(body: Any) -> Iterator[Any]:
    """The body with each of VALUES in place of each of its parts."""
    for at in paths(body):
        for new in VALUES:
            yield put(body, at, new)
