"""A session's stream for `async for`: the pieces of `generate`, and an end whenever it is asked."""

import asyncio
import contextlib
import threading

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis import Engine, SamplerParams
from tamis.engine.generate import Piece
from tamis.engine.streaming import stream

GREEDY = SamplerParams(temp=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec())
    with Engine.load(path, n_threads=1) as engine:
        yield engine


async def collected(session, ids, n):
    return [piece async for piece in session.stream(ids, GREEDY, max_tokens=n)]


def test_a_stream_has_the_pieces_of_generate_and_lets_others_run(engine):
    async def both():
        ticks, done = 0, False

        async def tick():
            nonlocal ticks
            while not done:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        with engine.session(n_ctx=256) as a, engine.session(n_ctx=256) as b:
            found = await asyncio.gather(collected(a, [5, 6], 20), collected(b, [7, 8], 20))
        done = True
        await ticking
        return found, ticks

    found, ticks = asyncio.run(both())
    for ids, pieces in zip(([5, 6], [7, 8]), found, strict=True):
        with engine.session(n_ctx=256) as session:
            assert pieces == list(session.generate(ids, GREEDY, max_tokens=20))
    assert ticks > 20


def test_errors_come_out_and_a_wrong_type_is_one_before_anything_is_done(engine):
    with engine.session(n_ctx=16) as session:
        with pytest.raises(ValueError, match="n_ctx is 16"):
            asyncio.run(collected(session, [5] * 20, 4))
        with pytest.raises(TypeError, match="ids is the text 'hello'"):
            asyncio.run(collected(session, "hello", 4))
        assert session.n_past == 0


@pytest.mark.parametrize("leave", ["close", "cancel"])
def test_a_caller_who_goes_ends_generation_and_the_session_goes_on(engine, leave):
    """What was yielded stays; the session then answers as one that holds the same tokens."""

    async def some(session):
        async with contextlib.aclosing(session.stream([5, 6], GREEDY, max_tokens=200)) as pieces:
            n = 0
            async for _ in pieces:
                n += 1
                if n == 5:
                    if leave == "close":
                        return
                    asyncio.current_task().cancel()

    with engine.session(n_ctx=256) as session:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(some(session))
        held = session.tokens
        assert 2 + 5 <= len(held) <= 2 + 7
        with engine.session(n_ctx=256) as fresh:
            fresh.prefill(held)
            assert session.decode(9).argmax() == fresh.decode(9).argmax()
    assert not [t for t in threading.enumerate() if t.name.startswith("tamis-stream")]


def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(engine):
    """Reading stops at a chunk, and the session holds what it held before."""

    async def cancelled_while_reading(session):
        task = asyncio.create_task(collected(session, [5] * 4000, 1))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    with engine.session(n_ctx=4096, n_ubatch=2) as session:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled_while_reading(session))
        assert session.n_past == 0


def test_a_caller_who_is_cancelled_again_and_again_still_waits_for_the_step():
    """As frameworks do whose cancellation is repeated until the task has ended."""
    entered, may_go, closed = threading.Event(), threading.Event(), threading.Event()

    def make(progress):
        try:
            entered.set()
            may_go.wait()
            yield Piece("a", 1, 0.0, None)
        finally:
            closed.set()

    async def run():
        async def read():
            async with contextlib.aclosing(stream(make)) as pieces:
                async for _ in pieces:
                    pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(entered.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed.is_set()

    asyncio.run(run())
