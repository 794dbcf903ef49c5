"""An app that streams answers with FastAPI; generation ends when the client goes.

usage: pip install fastapi uvicorn && tamis pull smollm2
       uvicorn --app-dir examples fastapi_app:app       (MODEL: another name or path)
       curl -N "localhost:8000/ask?question=Why+is+the+sky+blue"
"""

import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import tamis

engine = tamis.Engine.load(os.environ.get("MODEL", "smollm2"))
app = FastAPI()


async def answer(question: str) -> AsyncIterator[str]:
    """Yield the answer piece by piece; a session of its own keeps questions apart."""
    prompt = engine.encode_chat([{"role": "user", "content": question}])
    with engine.session(n_ctx=4096) as session:
        async with contextlib.aclosing(session.stream(prompt)) as pieces:
            async for piece in pieces:
                yield piece.text


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    """The answer as text, while it is written."""
    return StreamingResponse(answer(question), media_type="text/plain")
