"""Load for `tamis serve`: many clients for some minutes, each answer compared with an unloaded one.

python -m tamis.tools.load_serve -m MODEL --clients 16 --minutes 3 -- [flags of tamis serve] starts
a server and asks each question alone; then all clients ask at once, greedily, some of them in
streams and some disconnecting early. Beside them are clients with grammars, tools and embeddings,
and hostile and slow ones (--strangers, see load_strangers). It ends with counts of wrong, mixed and
lost answers, latencies, the server's memory, descriptors and threads over time, and tokens per
second of one stream and of four. The exit code is 1 if an answer was wrong, mixed (another
question's) or lost, or if memory grew. Products of one row and of several round differently: an
answer may differ from the one alone from a token on where that one's likeliest two were within
CLOSE of each other; such answers are counted separately.
"""

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tamis.tools.load_strangers import Strangers

CLOSE = 0.02  # nats between two tokens whose order rounding may decide
MOST_GROWTH = 0.05  # of memory, from the end of the first minute to the end
TIMEOUT = 300
PROMPT, LATE = 1.0, 2.0  # seconds to a first token
TOPICS = (
    "Name three colours.",
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Count from one to ten.",
    "What do cows eat?",
    "Why is the sky blue?",
    "Give a word that rhymes with house.",
    "Say hello in Spanish.",
    "What is two plus two?",
    "Name a famous painter.",
    "What is ice made of?",
    "Write a short poem about the sea.",
)


Waits = dict[str, list[tuple[float, float]]]  # see Found.first


@dataclass
class Found:
    """The counts and times that the clients have measured."""

    seconds: list[float] = field(default_factory=list)
    right: int = 0
    rounded: int = 0  # differs from the right one from a token that was a close call
    mixed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    busy: int = 0
    broken_off: int = 0
    tokens: int = 0
    # when each stream was asked for and the seconds to its first token, by question
    first: Waits = field(default_factory=dict)


class Client:
    """One connection's worth of requests."""

    def __init__(self, port: int) -> None:
        self._port, self.first = port, 0.0  # self.first: seconds to the last stream's first token

    def answer(self, question: str, n: int) -> tuple[int, str, int]:
        """The status, text and number of tokens of an answer."""
        status, data = self._post(_body(question, n))
        if status != 200:
            return status, "", 0
        reply = json.loads(data)
        text = reply["choices"][0]["message"]["content"]
        return status, text, reply["usage"]["completion_tokens"]

    def stream(self, question: str, n: int, *, most: int = 1 << 30) -> tuple[int, str, int]:
        """The same for a stream, which is closed after `most` chunks."""
        body = _body(question, n) | {"stream": True, "stream_options": {"include_usage": True}}
        text, tokens, begin, self.first = "", 0, time.monotonic(), 0.0
        with _connection(self._port) as connection:
            response = _send(connection, body)
            if response.status != 200:
                response.read()
                return response.status, "", 0
            for i, chunk in enumerate(_chunks(response)):
                if i >= most:
                    return 0, text, 0
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    self.first = self.first or (time.monotonic() - begin if text else 0.0)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        return 200, text, tokens

    def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        with _connection(self._port) as connection:
            response = _send(connection, body)
            return response.status, response.read()


class _connection(http.client.HTTPConnection):
    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, timeout=TIMEOUT)

    def __enter__(self) -> "_connection":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _send(connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection.getresponse()


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield chunk
    raise RuntimeError("the stream was cut off")


class Alone:
    """An answer to a question that was asked alone."""

    def __init__(self, port: int, question: str, n: int) -> None:
        with _connection(port) as connection:
            body = _body(question, n) | {"logprobs": True, "top_logprobs": 2}
            choice = json.loads(_send(connection, body).read())["choices"][0]
        self.text: str = choice["message"]["content"]
        self._tokens = choice["logprobs"]["content"]

    def close_call(self, other: str) -> bool:
        """Whether another text first differs from this one at a token that was a close call."""
        at = 0
        for token in self._tokens:
            if not other.startswith(token["token"], at):
                first, second = (top["logprob"] for top in token["top_logprobs"][:2])
                return bool(first - second < CLOSE)
            at += len(token["token"])
        return False


def _body(question: str, n: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": n}


def questions(n: int) -> list[str]:
    """Questions of several lengths; some share a long beginning."""
    story = "The old man went to the market and bought bread, cheese and wine. " * 8
    return [
        (story if i % 4 == 3 else "") + f"Question {i}: {TOPICS[i % len(TOPICS)]}" for i in range(n)
    ]


def memory(pid: int) -> int:
    """Bytes that a process has for itself (anonymous pages)."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0


def family(pid: int) -> list[int]:
    """The processes of a server: its own, that of its model, and the helper."""
    found = [pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"tamis.bindings.serve." in command:
            found.append(int(stat.parent.name))
    return found


def state(pid: int) -> tuple[int, int, int]:
    """The private bytes, descriptors and threads of a server's processes together."""
    sums = [0, 0, 0]
    for one in family(pid):
        folder = Path(f"/proc/{one}")
        n_open, n_thread = (sum(1 for _ in (folder / name).iterdir()) for name in ("fd", "task"))
        sums = [a + b for a, b in zip(sums, (memory(one), n_open, n_thread), strict=True)]
    return sums[0], sums[1], sums[2]


def judge(found: Found, given: str, question: str, right: dict[str, Alone]) -> None:
    """Count an answer."""
    expected = right[question]
    if given == expected.text:
        found.right += 1
    elif expected.close_call(given):
        found.rounded += 1
    elif given in [alone.text for alone in right.values()]:
        found.mixed.append(question)
    else:
        found.wrong.append(f"{question!r}: {given!r} for {expected.text!r}")


def load(
    port: int, n_client: int, seconds: float, n: int, right: dict[str, Alone], pause: float = 0
) -> Found:
    """Ask with n_client threads until the time is over.

    Pending answers are then awaited and counted.

    pause: seconds of a client between its questions.
    """
    found, lock, end = Found(), threading.Lock(), time.monotonic() + seconds
    asked = list(right)

    def work(me: int) -> None:
        client, turn = Client(port), me
        while time.monotonic() < end:
            question, kind = asked[turn % len(asked)], (turn // len(asked) + me) % 5
            turn += n_client + 1
            time.sleep(pause)
            begin = time.monotonic()
            try:
                if kind == 0:
                    client.stream(question, n, most=4)
                    with lock:
                        found.broken_off += 1
                    continue
                call = client.stream if kind < 3 else client.answer
                status, text, tokens = call(question, n)
            except Exception as error:
                with lock:
                    found.lost.append(f"{question!r}: {error!r}")
                continue
            with lock:
                if status == 429:
                    found.busy += 1
                elif status != 200:
                    found.lost.append(f"{question!r}: status {status}")
                else:
                    found.seconds.append(time.monotonic() - begin)
                    if call == client.stream:
                        found.first.setdefault(question, []).append((begin, client.first))
                    found.tokens += tokens
                    judge(found, text, question, right)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_client)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def rate(port: int, n_stream: int, n: int) -> float:
    """Tokens per second of n_stream streams at once."""
    counts = [0] * n_stream

    def work(i: int) -> None:
        body = "Write a long story about a ship." + " " * i
        counts[i] = Client(port).stream(body, n)[2]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n_stream)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - begin)


def start(model: str, flags: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """A server on a free port."""
    command = [sys.executable, "-P", "-m", "tamis", "serve", "-m", model, "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        ready = re.search(r"at http://127\.0\.0\.1:(\d+):", line)
        if ready:
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return server, int(ready[1])
    raise RuntimeError("the server has ended")


def main() -> int:
    """Run the test; prints its numbers, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--quiet", type=float, default=0, help="minutes before without strangers")
    parser.add_argument("--strangers", type=int, default=2, help="other clients (default: 2)")
    parser.add_argument("--pause", type=float, default=0, help="seconds between questions")
    parser.add_argument("-n", "--max-tokens", type=int, default=24)
    parser.add_argument("flags", nargs="*", help="flags of tamis serve, after --")
    arguments = parser.parse_args()
    server, port = start(arguments.model, arguments.flags)
    try:
        report = measure(server.pid, port, arguments)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(30)
    print(json.dumps(report | {"exit": code}))
    taken = report["memory_mb"]
    flat = taken[-1] <= (1 + MOST_GROWTH) * taken[len(taken) // 3]
    bad = report["lost"] or report["wrong"] or report["mixed"] or report["strangers_wrong"]
    return int(bool(bad or code or not flat))


def measure(pid: int, port: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the rates, then the load."""
    n = arguments.max_tokens
    rates = {k: statistics.median(rate(port, k, 192) for _ in range(3)) for k in (1, 4)}
    print(f"one stream {rates[1]:.1f} tok/s, four {rates[4]:.1f} ({rates[4] / rates[1]:.2f} x)")
    right = {question: Alone(port, question, n) for question in questions(24)}
    print(f"{len(right)} answers alone, {len({a.text for a in right.values()})} different")
    quiet = load(port, arguments.clients, 60 * arguments.quiet, n, right, arguments.pause)
    strangers = Strangers(port, arguments.pause)
    taken: list[tuple[int, int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            taken.append(state(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes
    others = [
        threading.Thread(target=strangers.run, args=(i, end)) for i in range(arguments.strangers)
    ]
    for other in others:
        other.start()
    found = load(port, arguments.clients, 60 * arguments.minutes, n, right, arguments.pause)
    for other in others:
        other.join()
    seconds = time.monotonic() - begin
    over.set()
    watcher.join()
    for text in (*found.wrong, *found.mixed, *found.lost, *strangers.wrong)[:10]:
        print("!", text)
    ordered = sorted(found.seconds)
    sampled = [taken[i * (len(taken) - 1) // 9] for i in range(10)]
    return {
        "clients": arguments.clients,
        "seconds": round(seconds, 1),
        "answers": len(ordered),
        "right": found.right,
        "other_by_rounding": found.rounded,
        "wrong": len(found.wrong),
        "mixed": len(found.mixed),
        "lost": len(found.lost),
        "busy": found.busy,
        "broken_off": found.broken_off,
        "p50_s": round(ordered[len(ordered) // 2], 2),
        "p99_s": round(ordered[len(ordered) * 99 // 100], 2),
        "first_s": waits(quiet.first, found.first, strangers.asked),
        "tokens_per_s": round(found.tokens / seconds, 1),
        "one_stream": round(rates[1], 1),
        "four_streams": round(rates[4], 1),
        "strangers": dict(strangers.counts),
        "strangers_wrong": len(strangers.wrong),
        "memory_mb": [round(bytes_ / 1e6, 1) for bytes_, _, _ in sampled],
        "descriptors": [n_open for _, n_open, _ in sampled],
        "threads": [n_thread for _, _, n_thread in sampled],
        "cpus": len(os.sched_getaffinity(0)),
    }


def waits(quiet: Waits, beside: Waits, asked: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Seconds to a stream's first token, without strangers and with them: p50, p99, maximum.

    asked: the strangers' requests, each with its begin and end.
    late: waits with strangers of over LATE seconds, for questions that always began within PROMPT
    without, each with the strangers' requests that were under way meanwhile.
    """
    found: dict[str, Any] = {}
    for name, first in (("quiet", quiet), ("beside", beside)):
        ordered = sorted(seconds for each in first.values() for _, seconds in each)
        if n := len(ordered):
            picked = (ordered[n // 2], ordered[n * 99 // 100], ordered[-1])
            found[name] = [n, *(round(seconds, 2) for seconds in picked)]
    prompt = [question for question, each in quiet.items() if max(s for _, s in each) <= PROMPT]
    promised = [wait for question in prompt for wait in beside.get(question, [])]
    found["promised"], found["late"] = len(promised), []
    for begin, seconds in sorted(promised):
        if seconds > LATE:
            others = [name for name, start, end in asked if start < begin + seconds and end > begin]
            found["late"].append([round(seconds, 2), *sorted(others)])
    return found


if __name__ == "__main__":
    sys.exit(main())
