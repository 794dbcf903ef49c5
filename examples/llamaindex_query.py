"""A LlamaIndex query over tamis: one model finds the note that matters and answers from it.

usage: PYTHONPATH=tests/support/shims python examples/llamaindex_query.py [MODEL]
tests/support/shims has a module llama_cpp of two lines. Needs llama-index-core and
llama-index-llms-llama-cpp (with pip's --no-deps, or it brings llama-cpp-python).
"""

import sys

from llama_cpp import Llama
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.llms.llama_cpp import LlamaCPP

from tamis.fetch import registry as models

NOTES = (
    "The boiler was repaired on the third of May.",
    "Aunt Rose brings the apple cake to the party.",
    "The spare key of the garden shed is under the blue flower pot.",
)


QUESTION = "Where is the spare key of the garden shed?"


class Embedder(BaseEmbedding):
    """Embeddings of texts by a Llama made for them."""

    _llm: Llama

    def __init__(self, path: str) -> None:
        super().__init__()
        self._llm = Llama(path, embedding=True, pooling_type=1, n_ctx=512, verbose=False)

    def _get_text_embedding(self, text: str) -> list[float]:
        found: list[float] = self._llm.embed(text, normalize=True)
        return found

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def main(model: str) -> None:
    """Ask one question about the notes."""
    path = str(models.pull(model) if model in models.KNOWN else models.resolve(model))
    llm = LlamaCPP(
        model_path=path, context_window=1024, max_new_tokens=32, temperature=0, verbose=False
    )
    documents = [Document(text=note) for note in NOTES]
    index = VectorStoreIndex.from_documents(documents, embed_model=Embedder(path))
    answer = index.as_query_engine(llm=llm, similarity_top_k=1).query(QUESTION)
    print(answer.source_nodes[0].text)
    print(str(answer).strip())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else models.DEFAULT)
