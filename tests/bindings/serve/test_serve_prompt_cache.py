"""Prompts that slots no longer hold: read once, for whom they are of, and for nobody else."""

import queue
import random
import re
import threading

import numpy as np
import pytest
from serving import local_server
from starlette.testclient import TestClient

from tamis.bindings.drop_in.completion import Piece, Request
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.guard import Access
from tamis.bindings.serve.jobs import Keeping, Kept
from tamis.bindings.serve.worker import Completion, Worker
from tamis.engine.prompt_cache import PromptCache
from tamis.jit_kernels.contract.types import PAGE
from tamis.sampling.chain import Sampler, SamplerParams

N_CTX, MIB = 512, 1 << 20
CLOSE = 1e-3  # of logits: rounding decides between tokens that are nearer than this
TEXT = "/v1/completions"


def sessions(engine, n):
    return [engine.session(n_ctx=N_CTX, n_ubatch=64) for _ in range(n)]


def asked(engine, prompt, n, scope="", **fields):
    events = queue.SimpleQueue()
    sampler = Sampler(SamplerParams(temp=0), engine.hp.n_vocab)
    request = Request(prompt, n, "tiny", **fields)
    job = Completion(prompt, events.put, request=request, sampler=sampler, scope=scope)
    return job, events


def tokens_of(events):
    """The tokens of an answer."""
    found = []
    while True:
        event = events.get(timeout=60)
        assert not isinstance(event, ApiError), event
        if isinstance(event, Piece):
            found += event.ids
            if event.finish:
                return found


def run(worker, engine, prompt, n=4, scope="", **fields):
    """The answer's tokens, and how many of the prompt's were held."""
    job, events = asked(engine, prompt, n, scope, **fields)
    worker.submit([job])
    return tokens_of(events), job.n_cached


def check_alone(session, prompt, tokens):
    """An answer is the one of a session that has read nothing else, but for near ties."""
    session.truncate(0)
    logits = session.prefill(prompt)
    for token in tokens:
        assert logits[token] >= logits.max() - CLOSE, "another conversation's text"
        logits = session.decode(token)


def words(engine, n, draw):
    return [draw.randrange(5, engine.hp.n_vocab) for _ in range(n)]


def make_worker(engine, n_slot, cache):
    return Worker(engine, sessions(engine, n_slot), cache=cache)


def end(worker):
    worker.stop()
    assert worker.join(30)


class Client(threading.Thread):
    """Asks conversations again and again, edits them, and cancels some."""

    def __init__(self, engine, worker, seed, scope):
        super().__init__()
        self.engine, self.worker, self.scope = engine, worker, scope
        self.draw, self.found, self.failed = random.Random(seed), [], None
        head = words(engine, 70, random.Random(7))  # a prefix that all clients have
        self.texts = [head + words(engine, 60 + 40 * i, self.draw) for i in range(4)]
        # Pages that all clients have, each in an order of its own: a page's keys are of what is
        # before it.
        blocks = [words(engine, PAGE, random.Random(i)) for i in range(3)]
        for _ in range(2):
            self.texts.append([word for block in self.draw.sample(blocks, 3) for word in block])

    def run(self):
        try:
            for _ in range(12):
                self.turn()
        except BaseException as error:
            self.failed = error

    def turn(self):
        draw, i = self.draw, self.draw.randrange(len(self.texts))
        text = self.texts[i]
        if draw.random() < 0.3:  # an edit in the middle
            at = draw.randrange(len(text))
            text[at] = draw.randrange(5, self.engine.hp.n_vocab)
        job, events = asked(self.engine, list(text), 6, self.scope)
        self.worker.submit([job])
        if draw.random() < 0.25:
            if draw.random() < 0.5:
                events.get(timeout=60)
            job.cancelled = True
            return
        tokens = tokens_of(events)
        self.found.append((list(text), tokens))
        if len(text) < 300:
            text += tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_no_client_gets_anothers_text(engine, tmp_path, seed):
    """Eight clients of two scopes on three slots, with evictions from RAM and disk under way."""
    cache = PromptCache.open(300_000, tmp_path, 1_500_000)
    worker = make_worker(engine, 3, cache)
    clients = [Client(engine, worker, 100 * seed + i, f"key {i % 2}") for i in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(300)
        assert not client.is_alive()
    end(worker)
    cache.close()
    (alone,) = sessions(engine, 1)
    for client in clients:
        assert client.failed is None, client.failed
        for prompt, tokens in client.found:
            check_alone(alone, prompt, tokens)
    assert sum(len(client.found) for client in clients) > 50
    assert cache.n_hits > 10
    assert cache.n_ram_evicted > 20
    assert cache.n_evicted > 20
    assert cache.n_failed == 0


def test_six_conversations_on_two_slots_are_read_once(engine):
    cache = PromptCache.open(8 * MIB)
    worker, draw = make_worker(engine, 2, cache), random.Random(1)
    texts = [words(engine, 300, draw) for _ in range(6)]
    for text in texts:
        tokens, n_cached = run(worker, engine, text)
        assert n_cached == 0
        text += tokens
    for text in texts:
        tokens, n_cached = run(worker, engine, [*text, 5, 6, 7])
        assert n_cached >= 303
    assert worker.counts.cache_hits >= 4
    assert worker.counts.restored_tokens >= 4 * 303
    assert worker.counts.cache_ram == cache.ram_bytes > 0
    end(worker)


def test_after_a_restart_only_new_tokens_are_read(engine, tmp_path):
    draw = random.Random(2)
    text = words(engine, 300, draw)
    for n_least in (0, 303, 303):
        cache = PromptCache.open(MIB, tmp_path, 16 * MIB)
        worker = make_worker(engine, 1, cache)
        tokens, n_cached = run(worker, engine, [*text, 9, 9])
        assert n_cached >= n_least - 3
        assert (n_cached > 0) == (n_least > 0)
        end(worker)
        cache.close()
        check_alone(sessions(engine, 1)[0], [*text, 9, 9], tokens)


def test_a_cancelled_prompt_is_kept_as_far_as_it_was_read(engine):
    cache = PromptCache.open(8 * MIB)
    worker, text = make_worker(engine, 1, cache), words(engine, 400, random.Random(3))
    job, _ = asked(engine, text, 4)
    read = threading.Event()
    job.emit = lambda event: (read.set(), setattr(job, "cancelled", getattr(event, "done", 0) > 99))
    worker.submit([job])
    assert read.wait(60)
    run(worker, engine, words(engine, 300, random.Random(4)))
    _, n_cached = run(worker, engine, text)
    assert 64 <= n_cached < 399
    end(worker)


def test_a_prompt_that_asks_for_no_cache_has_none(engine):
    cache = PromptCache.open(8 * MIB)
    worker, text = make_worker(engine, 1, cache), words(engine, 300, random.Random(5))
    run(worker, engine, text)
    run(worker, engine, words(engine, 300, random.Random(6)))
    job, events = asked(engine, text, 4)
    job.cached = False
    worker.submit([job])
    tokens_of(events)
    assert job.n_cached == 0
    end(worker)


def test_a_context_that_was_shifted_is_not_kept_as_if_it_were_read(engine, tmp_path):
    """Its later tokens have read those that were dropped."""
    cache = PromptCache.open(0, tmp_path, 16 * MIB)
    worker, text = make_worker(engine, 1, cache), words(engine, 500, random.Random(8))
    run(worker, engine, text, n=80, n_keep=70)
    end(worker)
    assert cache._files.flush(10)
    (slot,) = worker._slots
    held = slot.session.tokens
    assert len(held) < len(text)
    (other,) = sessions(engine, 1)
    # The prompt was kept before; the sequence after the shift was not, beyond what both have.
    assert cache.extend(other, text) == 499
    other.truncate(0)
    assert cache.extend(other, held) <= 70


def test_a_sequence_of_a_file_is_not_kept_as_if_it_were_read(engine, tmp_path):
    """Who has written it, nobody knows."""
    cache = PromptCache.open(8 * MIB)
    (stranger,) = sessions(engine, 1)
    text, other = (words(engine, 200, random.Random(i)) for i in (9, 10))
    stranger.prefill(other)
    stranger._tokens = list(text)  # keys of one text, tokens of another
    stranger.save(tmp_path / "slot")
    worker, events = make_worker(engine, 2, cache), queue.SimpleQueue()
    restore = Keeping([], events.put, slot=0, action="restore", path=str(tmp_path / "slot"))
    worker.submit([restore])
    assert isinstance(events.get(timeout=60), Kept)
    run(worker, engine, [*text, 5])
    fresh = sessions(engine, 1)[0]
    assert cache.extend(fresh, text) == 0
    end(worker)


def test_an_erased_slot_is_evicted(engine, tmp_path):
    cache = PromptCache.open(MIB, tmp_path, 16 * MIB)
    worker, text = make_worker(engine, 1, cache), words(engine, 200, random.Random(11))
    run(worker, engine, text)
    events = queue.SimpleQueue()
    worker.submit([Keeping([], events.put, slot=0, action="erase", path="")])
    assert isinstance(events.get(timeout=60), Kept)
    assert run(worker, engine, text)[1] == 0
    end(worker)


def test_a_cache_that_fails_fails_no_answer(engine, monkeypatch, capfd):
    cache = PromptCache.open(8 * MIB)
    monkeypatch.setattr(cache, "keep", lambda *_: 1 / 0)
    worker, text = make_worker(engine, 1, cache), words(engine, 100, random.Random(12))
    for _ in range(2):
        tokens, _ = run(worker, engine, text)
        check_alone(sessions(engine, 1)[0], text, tokens)
    end(worker)
    assert "prompt cache" in capfd.readouterr().err


def server(engine, folder, keys):
    cache = PromptCache.open(MIB, folder, 16 * MIB)
    access = Access(("localhost",), "\n".join(keys))
    return local_server(
        engine, sessions(engine, 1), Settings(access=access, metrics=True), cache=cache
    ), cache


def ask(client, key, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    found = client.post(TEXT, json=body, headers=headers).json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_and_salts_share_nothing_also_where_keys_change_places(engine, tmp_path):
    """A key's number is not what files are of: after a restart it may be another one's."""
    text = words(engine, 200, random.Random(13))
    for i, keys in enumerate((["one", "two"], ["two", "one"], ["zero", "two", "one"], ["two"])):
        found, cache = server(engine, tmp_path, keys)
        with TestClient(found.app, base_url="http://localhost") as client:
            if i == 0:
                assert ask(client, "one", text) == 0
            elif "one" in keys:
                assert ask(client, "one", text) == 199
                assert ask(client, "one", text, cache_salt=f"salt {i}") == 0
            if i < 3:
                fresh = words(engine, 200, random.Random(100 + i))
                assert ask(client, "two", fresh) == 0
            assert ask(client, "two", text) == (0 if i == 0 else 199)
        found.stop()
        found.close()
        cache.close()


def test_metrics_and_usage_tell_of_it(engine, tmp_path):
    found, cache = server(engine, tmp_path, ["one"])
    a, b = (words(engine, 200, random.Random(i)) for i in (14, 15))
    with TestClient(found.app, base_url="http://localhost") as client:
        assert [ask(client, "one", text) for text in (a, b, a)] == [0, 0, 199]
        headers = {"Authorization": "Bearer one"}
        text = client.get("/metrics", headers=headers).text
        told = {
            name: float(value)
            for name, value in re.findall(r"^tamis_(cache_\w+) (\S+)$", text, re.M)
        }
        assert told["cache_hits_total"] == 1
        assert told["cache_restored_tokens_total"] == 199
        assert told["cache_restored_bytes_total"] > 0
        assert told["cache_failures_total"] == 0
        assert told["cache_ram_bytes"] > 0
        assert told["cache_kept_bytes_total"] >= told["cache_ram_bytes"]
    found.stop()
    found.close()
    cache.close()
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.page"))
    assert cache.disk_bytes == held > 0
    assert np.isfinite(held)
