"""The examples of llama-cpp-python's README, with a small model's path.

bindings/tamis_llama_cpp comes first on the path.

usage: python readme_of_llama_cpp.py MODEL. Prints one JSON object of results.
"""

import ctypes
import json
import sys

import llama_cpp
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

path, found = sys.argv[1], {}

llm = Llama(model_path=path, seed=1337, n_ctx=2048)
found["completion"] = llm(
    "Q: Name the planets in the solar system? A: ", max_tokens=32, stop=["Q:", "\n"], echo=True
)

llm = Llama(model_path=path, chat_format="chatml")
found["chat"] = llm.create_chat_completion(
    messages=[
        {"role": "system", "content": "You are an assistant who perfectly describes images."},
        {"role": "user", "content": "Describe this image in detail please."},
    ],
    max_tokens=12,
)
messages = [
    {"role": "system", "content": "You are a helpful assistant that outputs in JSON."},
    {"role": "user", "content": "Who won the world series in 2020"},
]
found["schema"] = llm.create_chat_completion(
    messages=messages,
    response_format={
        "type": "json_object",
        "schema": {
            "type": "object",
            "properties": {"team_name": {"type": "string", "maxLength": 20}},
            "required": ["team_name"],
        },
    },
    temperature=0.7,
)
found["tool"] = Llama(
    model_path=path, chat_format="chatml-function-calling"
).create_chat_completion(
    messages=[{"role": "user", "content": "Extract Jason is 25 years old"}],
    tools=[
        {
            "type": "function",
            "function": {
                "name": "UserDetail",
                "parameters": {
                    "type": "object",
                    "title": "UserDetail",
                    "properties": {
                        "name": {"title": "Name", "type": "string", "maxLength": 20},
                        "age": {"title": "Age", "type": "integer", "maximum": 999},
                    },
                    "required": ["name", "age"],
                },
            },
        }
    ],
    tool_choice={"type": "function", "function": {"name": "UserDetail"}},
)

llama = Llama(model_path=path, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2))
found["draft"] = llama("one two three one two", max_tokens=8)

llm = llama_cpp.Llama(model_path=path, embedding=True)
embeddings = llm.create_embedding("Hello, world!")
found["embedding"] = {**embeddings, "data": len(embeddings["data"])}
found["embeddings"] = len(llm.create_embedding(["Hello, world!", "Goodbye, world!"])["data"])

llama_cpp.llama_backend_init()
model_params = llama_cpp.llama_model_default_params()
ctx_params = llama_cpp.llama_context_default_params()
prompt = b"Q: Name the planets in the solar system? A: "
model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
ctx = llama_cpp.llama_init_from_model(model, ctx_params)
vocab = llama_cpp.llama_model_get_vocab(model)
max_tokens = ctx_params.n_ctx
tokens = (llama_cpp.llama_token * int(max_tokens))()
n_tokens = llama_cpp.llama_tokenize(
    vocab, prompt, len(prompt), tokens, max_tokens, ctypes.c_bool(True), ctypes.c_bool(False)
)
found["low level"] = tokens[:n_tokens]
llama_cpp.llama_free(ctx)
llama_cpp.llama_model_free(model)

print(json.dumps(found))
