"""A LangChain chain over tamis: LangChain's own llama.cpp classes, which import `llama_cpp`.

usage: PYTHONPATH=tests/support/shims python examples/langchain_chain.py [MODEL]
tests/support/shims has a module llama_cpp of two lines. Needs langchain-community.
"""

import sys

from langchain_community.chat_models import ChatLlamaCpp
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from tamis.fetch import registry as models


def main(model: str) -> None:
    """Answer a question, in a stream."""
    path = str(models.pull(model) if model in models.KNOWN else models.resolve(model))
    messages = [("user", "What is the capital of {country}?")]
    llm = ChatLlamaCpp(model_path=path, n_ctx=512, temperature=0, max_tokens=16, verbose=False)
    chain = ChatPromptTemplate.from_messages(messages) | llm | StrOutputParser()
    for text in chain.stream({"country": "France"}):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else models.DEFAULT)
