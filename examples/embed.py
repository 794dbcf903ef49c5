"""A language model inside a program: load once, answer, stream, ask for JSON, measure likeness.

usage: python examples/embed.py [MODEL]   (a path, or a name that `tamis pull` knows)
"""

import json
import sys

import numpy as np

from tamis import Llama
from tamis.fetch import registry as models


def main(model: str) -> None:
    """Show the four things most programs need."""
    path = str(models.pull(model) if model in models.KNOWN else models.resolve(model))
    llm = Llama(path, n_ctx=2048, seed=1)

    question = [{"role": "user", "content": "Name three colours."}]
    answer = llm.create_chat_completion(question, max_tokens=40, temperature=0)
    print(answer["choices"][0]["message"]["content"])

    for chunk in llm("Once upon a time", max_tokens=16, stream=True):
        print(chunk["choices"][0]["text"], end="", flush=True)
    print()

    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}}}
    wanted = {"type": "json_object", "schema": schema | {"required": ["colour"]}}
    answer = llm.create_chat_completion(question, response_format=wanted, max_tokens=40)
    print(json.loads(answer["choices"][0]["message"]["content"] or "")["colour"])

    reader = Llama(path, embedding=True, pooling_type=1)
    a, b, c = (np.array(reader.embed(t, normalize=True)) for t in ("a cat", "a dog", "1 + 1 = 2"))
    print(f"cat and dog {a @ b:.2f}, cat and sum {a @ c:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else models.DEFAULT)
