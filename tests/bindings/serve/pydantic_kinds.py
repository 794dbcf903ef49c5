"""Models of pydantic through openai-python against a running server, by hand.

    tamis serve -m qwen2.5-coder-0.5b --port 8080 &
    python tests/bindings/serve/pydantic_kinds.py http://127.0.0.1:8080/v1

Each kind of support/pydantic_models.py is asked for by response_format, as the arguments of a tool
and by /v1/responses, and is printed as the client has parsed it; the status is 1 if one is refused,
is cut at the limit of tokens or is not what its model says.
"""

import sys
import warnings
from pathlib import Path

import openai
from pydantic import BaseModel, create_model

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from pydantic_models import KINDS

# What pydantic says of a decimal is a number or any text.
HINTS = {"decimal": 'a price, {"field": 12.5}'}


def answers(client: openai.OpenAI, kind: str, model: type[BaseModel]) -> dict[str, object]:
    """What the client has parsed, or its error, by the way that was asked."""
    content = f"Give a short example of: {HINTS.get(kind, kind)}. Answer with JSON, in one line."
    messages = [{"role": "user", "content": content}]
    how = {"model": "m", "temperature": 0}
    chat = how | {"messages": messages, "max_tokens": 300}
    tool = openai.pydantic_function_tool(model, name="put")

    def formed() -> object:
        found = client.chat.completions.parse(**chat, response_format=model)
        return found.choices[0].message.parsed

    def called() -> object:
        found = client.chat.completions.parse(**chat, tools=[tool], tool_choice="required")
        return found.choices[0].message.tool_calls[0].function.parsed_arguments

    def responded() -> object:
        own = {"input": messages, "max_output_tokens": 300}
        return client.responses.parse(**how, **own, text_format=model).output_parsed

    found: dict[str, object] = {}
    for ask in (formed, called, responded):
        try:
            found[ask.__name__] = ask()
        except (openai.OpenAIError, ValueError) as error:
            found[ask.__name__] = error
    return found


def main() -> None:
    """Ask for every kind and print what came."""
    warnings.simplefilter("ignore")  # of fields that pydantic cannot describe
    client = openai.OpenAI(base_url=sys.argv[1], api_key="x", max_retries=0, timeout=600)
    n_right = 0
    for kind, field in KINDS.items():
        model = create_model("Record", field=(field, ...), __base__=BaseModel)
        found = answers(client, kind, model)
        n_right += sum(isinstance(each, model) for each in found.values())
        print(f"{kind}:", " | ".join(f"{way} {each!r}"[:160] for way, each in found.items()))
    print(f"{n_right} of {3 * len(KINDS)} right")
    sys.exit(n_right != 3 * len(KINDS))


if __name__ == "__main__":
    main()
