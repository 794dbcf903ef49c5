"""Compare speed with llama.cpp: alternating runs of the same work in one process tree.

    python -m tamis.tools.compare_llamacpp MODEL.gguf [--tests pp512,tg64,tg64@4096] [-t 2]

It needs the package llama-cpp-python, best built on this machine:
`CMAKE_ARGS=-DGGML_NATIVE=ON python -m pip install llama-cpp-python`.

Each engine has a process of its own that holds the model; only one works at a time. llama.cpp runs
with flash attention on and off, and the ratio of a round is to the better of the two. A test is
ppN[@D] (a prompt of N tokens after D others) or tgN[@D] (N tokens one at a time after D others).
Both use the same threads, the same ids and the same type of the KV cache: float16, or with
--cache-type q8_0, which llama.cpp supports with flash attention only. A deep context is its first
tokens repeated, re-rotated by each engine to their positions: dense attention takes the same time
whatever the keys are, and reading it would take hours. If layers have a sliding window, the context
is read: llama.cpp keeps only the window of them. On a machine with other work, compare one thread
with --processor-time. The last line is JSON; --log appends it to a file.
"""

import argparse
import functools
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

READ = 2048  # tokens that are read; longer contexts repeat them
PAUSE = 0.3  # seconds between runs, for the other engine's threads to fall asleep


class Test(NamedTuple):
    """One piece of work."""

    name: str
    n_prompt: int
    n_decode: int
    depth: int

    @property
    def n_ctx(self) -> int:
        """Tokens of context it needs."""
        return self.depth + self.n_prompt + self.n_decode

    @staticmethod
    def parse(text: str) -> "Test":
        """pp512, tg64, pp512@4096 or tg64@4096. Raises ValueError."""
        match = re.fullmatch(r"(pp|tg)(\d+)(?:@(\d+))?", text)
        if match is None or not int(match[2]):
            raise ValueError(f"test is {text!r}, expected ppN, tgN, ppN@DEPTH or tgN@DEPTH")
        n = int(match[2])
        return Test(text, *((n, 0) if match[1] == "pp" else (0, n)), int(match[3] or 0))


class TamisRunner:
    """tamis with a session as long as the longest test."""

    n_swa = 0  # it has no need to read a context

    def __init__(self, path: str, n_threads: int, n_ctx: int, cache_type: str) -> None:
        from tamis.engine.engine import Engine

        self.engine = Engine.load(path, n_threads=n_threads)
        self.engine.prepared()  # a thread that writes a copy of the weights would be measured, too
        self.session = self.engine.session(n_ctx=n_ctx, type_k=cache_type, type_v=cache_type)

    def keep(self, n: int) -> int:
        """Drop all but the first n tokens; returns how many are left."""
        self.session.truncate(min(n, self.session.n_past))
        return self.session.n_past

    def repeat(self, n: int) -> None:
        """Repeat the tokens held until there are n."""
        from tamis.tools.tile_session import tile

        tile(self.session, n)

    def prefill(self, ids: list[int]) -> None:
        """Append tokens and compute the logits of the last."""
        self.session.prefill(ids)

    def decode(self, ids: list[int]) -> None:
        """Append tokens one at a time and compute the logits of each."""
        for token in ids:
            self.session.decode(token)


class LlamaRunner:
    """llama.cpp through its C API, as llama-bench uses it."""

    def __init__(
        self, path: str, n_threads: int, n_ctx: int, cache_type: str, *, flash: bool
    ) -> None:
        import llama_cpp

        self.c, self.n_past = llama_cpp, 0
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.n_swa = llama_cpp.llama_model_n_swa(model)
        params = llama_cpp.llama_context_default_params()
        n_ctx += READ  # a copy may be cut anywhere
        params.n_ctx, params.n_batch, params.n_ubatch = -(-n_ctx // 256) * 256, 2048, 512
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = int(flash)
        params.n_seq_max, params.kv_unified = 2, True  # `repeat` copies through the second sequence
        types = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
        params.type_k = params.type_v = types[cache_type]
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context for {path}")

    def keep(self, n: int) -> int:
        """Drop all but the first n tokens; returns how many are left."""
        self.n_past = min(n, self.n_past)
        memory = self.c.llama_get_memory(self.context)
        self.c.llama_memory_seq_rm(memory, 0, self.n_past, -1)
        return self.n_past

    def repeat(self, n: int) -> None:
        """Repeat the tokens held until there are n."""
        memory, n_held = self.c.llama_get_memory(self.context), self.n_past
        size = self.c.llama_state_seq_get_size(self.context, 0)
        state = (self.c.ctypes.c_uint8 * size)()
        self.c.llama_state_seq_get_data(self.context, state, size, 0)
        for start in range(n_held, n, n_held):
            if not self.c.llama_state_seq_set_data(self.context, state, size, 1):
                raise RuntimeError(f"llama.cpp has no room for {n_held} tokens after {start}")
            self.c.llama_memory_seq_add(memory, 1, 0, -1, start)
            self.c.llama_memory_seq_rm(memory, 1, n, -1)
            self.c.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            self.c.llama_memory_seq_rm(memory, 1, -1, -1)
        self.n_past = n

    def prefill(self, ids: list[int]) -> None:
        """Append tokens and compute the logits of the last."""
        for start in range(0, len(ids), 2048):
            self._decode(ids[start : start + 2048])

    def decode(self, ids: list[int]) -> None:
        """Append tokens one at a time and compute the logits of each."""
        for token in ids:
            self._decode([token])

    def _decode(self, ids: list[int]) -> None:
        array = (self.c.llama_token * len(ids))(*ids)
        if self.c.llama_decode(self.context, self.c.llama_batch_get_one(array, len(ids))) != 0:
            raise RuntimeError(f"llama_decode failed at {self.n_past} tokens")
        self.c.llama_get_logits_ith(self.context, -1)  # waits for the result
        self.n_past += len(ids)


RUNNERS: dict[str, Any] = {
    "tamis": TamisRunner,
    "llama.cpp": functools.partial(LlamaRunner, flash=False),
    "llama.cpp fa": functools.partial(LlamaRunner, flash=True),
}


def run_test(
    runner: Any, test: Test, ids: list[int], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one test by a clock; the context is filled to its depth first."""
    if runner.keep(test.depth) < test.depth:
        n_read = test.depth if runner.n_swa else min(READ, test.depth)
        held = runner.keep(n_read)
        if held < n_read:
            runner.prefill(ids[held:n_read])
        if n_read < test.depth:
            runner.repeat(test.depth)
            runner.decode(ids[:1])  # re-rotates llama.cpp's keys
            runner.keep(test.depth)
    work = ids[test.depth : test.n_ctx]
    start = clock()
    if test.n_prompt:
        runner.prefill(work)
    else:
        runner.decode(work)
    return clock() - start


def runners(cache_type: str) -> list[str]:
    """The engines that support this KV cache type."""
    return [name for name in RUNNERS if cache_type == "f16" or name != "llama.cpp"]


def serve(pipe: Connection, clock: Callable[[], float], name: str, *arguments: Any) -> None:
    """Run an engine's process: load the model, then answer (test, ids) with seconds."""
    runner = RUNNERS[name](*arguments)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        test, ids = job
        pipe.send(run_test(runner, test, ids, clock))
    pipe.send(peak_memory())


def peak_memory() -> int:
    """The largest number of bytes that this process has held outside mapped files."""
    status = Path("/proc/self/status").read_text()
    resident = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(resident[1]) * 1024 if resident else 0


class Remote:
    """An engine in its own process."""

    def __init__(self, *arguments: Any) -> None:
        self.pipe, other = multiprocessing.Pipe()
        os.environ["PYTHONSAFEPATH"] = "1"  # its processes import nothing of this directory
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(other, *arguments))
        self.process.start()
        other.close()
        self.receive()

    def receive(self) -> Any:
        """The next object from the process. Raises RuntimeError if it has died."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"an engine ended with {self.process.exitcode}") from None

    def seconds(self, test: Test, ids: list[int]) -> float:
        """Run a test."""
        time.sleep(PAUSE)
        self.pipe.send((test, ids))
        return self.receive()

    def close(self) -> int:
        """End the process; returns the bytes of memory that it held at the end."""
        self.pipe.send(None)
        held = self.receive()
        self.process.join()
        return held


def compare(
    path: str,
    tests: list[Test],
    n_threads: int,
    rounds: int,
    cache_type: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """The results of all tests, which alternate: rates and ratios; first rounds do not count."""
    n_ctx = max(test.n_ctx for test in tests)
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 20000, n_ctx).tolist()  # ordinary tokens of any vocabulary
    remotes = {
        name: Remote(clock, name, path, n_threads, n_ctx, cache_type)
        for name in runners(cache_type)
    }
    results: dict[str, Any] = {}
    for test in sorted(tests, key=lambda t: t.depth):
        turns: list[dict[str, float]] = []
        for i in range(rounds + 1):
            turn = {name: remote.seconds(test, ids) for name, remote in remotes.items()}
            if i:
                turns.append(turn)
        results[test.name] = summary(test, turns)
        print(table_line(Path(path).name, test.name, results[test.name]), flush=True)
    memory = {name: remote.close() for name, remote in remotes.items()}
    return {
        "model": Path(path).name, "threads": n_threads, "rounds": rounds, "cores": os.cpu_count(),
        "cache_type": cache_type, "clock": clock.__name__, "date": time.strftime("%Y-%m-%d"),
        "tests": results, "memory": memory,
    }  # fmt: skip


def summary(test: Test, turns: list[dict[str, float]]) -> dict[str, Any]:
    """Median tokens per second of each engine, and the ratio to the better llama.cpp by round."""
    n = test.n_prompt + test.n_decode
    ratios = [
        min(seconds for name, seconds in turn.items() if name != "tamis") / turn["tamis"]
        for turn in turns
    ]
    rates = {name: round(n / statistics.median(t[name] for t in turns), 1) for name in turns[0]}
    return {
        "tokens_per_second": rates,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def table_line(model: str, test: str, result: dict[str, Any]) -> str:
    """A readable line of a result."""
    rates = "  ".join(f"{name} {rate:8.1f}" for name, rate in result["tokens_per_second"].items())
    span = f"{result['ratio_min']:.2f} to {result['ratio_max']:.2f}"
    return f"{model[:24]:24} {test:12} {rates} tok/s  ratio {result['ratio']:.2f} ({span})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", help="GGUF files")
    parser.add_argument("--tests", default="pp512,tg64", help="comma-separated: pp512, tg64@4096")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (one more is run)")
    parser.add_argument("--cache-type", choices=["f16", "q8_0"], default="f16")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of the engines' threads, not the clock's time",
    )
    parser.add_argument("--log", type=Path, help="file that JSON lines are appended to")
    args = parser.parse_args()
    try:
        tests = [Test.parse(text) for text in args.tests.split(",")]
    except ValueError as error:
        parser.error(str(error))
    for model in args.model:
        clock = time.process_time if args.processor_time else time.perf_counter
        line = json.dumps(compare(model, tests, args.threads, args.rounds, args.cache_type, clock))
        print(line, flush=True)
        if args.log:
            with args.log.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
