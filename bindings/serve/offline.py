"""Batches in OpenAI's form: a file of requests, one per line, and a file of their answers.

The file of answers is the only state: a request with an answer there is finished, and an
interrupted run resumes from it. Answers are written in the order in which they finish.
"""

import asyncio
import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tamis.platform.locks import try_lock
from tamis.platform.private_files import write_whole

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
TRIES = 3  # attempts for a request whose failures are not its own fault
PAUSE = 1.0  # seconds before the next attempt
_PASSING = {429, 500, 502, 503, 504}
_FIRST = 1024  # characters of a prompt that are kept for sorting
_HEAD = b'{"id": "batch_req_'  # the beginning of every line that this module writes


class BatchError(ValueError):
    """A file that cannot be used; the message says which, and what to do."""


class Lost(Exception):
    """The engine that was to answer has ended: another one takes the request."""


class Item(NamedTuple):
    """A request: one line of the file."""

    number: int  # from 1
    custom_id: str | None
    at: int = 0  # the offset of its first byte in the file
    prefix: bytes = b""  # sorts prompts with a common prefix next to each other
    wrong: tuple[str, str] | None = None  # the code and message of an invalid request

    @property
    def id(self) -> str:
        """The id of its answer."""
        return f"batch_req_{self.number}"

    @property
    def key(self) -> str:
        """The key that tells whether it is finished."""
        return self.id if self.custom_id is None else f"custom {self.custom_id}"


Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # (URL, body) -> (status, body)


def items(file: BinaryIO) -> Iterator[Item]:
    """The requests of a file; empty lines are skipped."""
    seen: dict[str, int] = {}
    at = file.seek(0)
    for number, line in enumerate(file, 1):
        if line.strip():
            item = _item(number, at, line)
            if item.custom_id is not None and item.custom_id in seen:
                text = f"custom_id {item.custom_id!r} is that of line {seen[item.custom_id]}, too"
                item = Item(number, None, wrong=("duplicate_custom_id", text))
            elif item.custom_id is not None:
                seen[item.custom_id] = number
            yield item
        at += len(line)


def _item(number: int, at: int, line: bytes) -> Item:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Item(number, None, wrong=("invalid_json", f"line {number} is no JSON: {error}"))
    if not isinstance(record, dict):
        return Item(number, None, wrong=("invalid_json", f"line {number} is no JSON object"))
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        text = f"custom_id of line {number} is {custom_id!r:.40}, expected a text"
        return Item(number, None, wrong=("invalid_custom_id", text))
    wrong = _wrong(record)
    try:
        prefix = b"" if wrong is not None else _prefix(record["body"], record["url"])
    except RecursionError:
        wrong = "invalid_json", f"line {number} is nested too deeply"
    if wrong is not None:
        return Item(number, custom_id, wrong=wrong)
    return Item(number, custom_id, at, prefix)


def _wrong(record: dict[str, Any]) -> tuple[str, str] | None:
    if record.get("method", "POST") != "POST":
        return "invalid_method", f"method is {record['method']!r:.40}, expected POST"
    if record.get("url") not in URLS:
        return "invalid_url", f"url is {record.get('url')!r:.60}, expected one of {', '.join(URLS)}"
    body = record.get("body")
    if not isinstance(body, dict):
        return "invalid_body", f"body is {body!r:.40}, expected an object"
    if body.get("stream"):
        return "invalid_body", "stream is true: an answer in a batch is whole, leave it out"
    return None


def _prefix(body: dict[str, Any], url: str) -> bytes:
    """The sort key of a prompt: the URL, its first characters, digests of longer prefixes."""
    prompt = body.get("prompt", body.get("input"))
    if "messages" in body:
        prompt = [body.get("tools"), body["messages"]]
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    n, key = _FIRST, text[:_FIRST].encode("utf-8", "surrogatepass")
    found = [url.encode(), key]
    while n < len(text):
        n *= 2
        part = text[:n].encode("utf-8", "surrogatepass")
        found.append(hashlib.blake2b(part, digest_size=8).digest())
    return b"\0".join(found)


class Answers:
    """The file of answers; only one process writes it.

    Answers of an earlier run count as finished; an incomplete last line is removed if it begins
    like an answer of this module. Raises BatchError if another process writes the file, or a line
    of it is not an answer: a file that was named by mistake is not changed.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115
        self.finished: set[str] = set()
        self.n_failed = 0
        try:
            self._lock(path)
            failed = self._read(path)
            if retry_failed and failed:
                self._drop(path, failed)
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path) -> None:
        if not try_lock(self._file.fileno()):
            raise BatchError(f"{path} is being written by another process: wait for its end")

    def _read(self, path: Path) -> set[str]:
        """Record what is finished and repair the end of the file.

        Returns the keys of failed requests.

        The file is changed only after all of it was found to be answers.
        """
        whole, failed, cut = self._file.seek(0), set(), b""
        for number, line in enumerate(self._file, 1):
            try:
                key, good = _answered(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n") or not _was_cut(line, first=number == 1):
                    text = f"line {number} of {path} is no answer of a batch: name another file"
                    raise BatchError(text) from None
                cut = line  # its writer was killed
                break
            whole += len(line)
            self.finished.add(key)
            if not good:
                failed.add(key)
            if not line.endswith(b"\n"):
                self._file.write(b"\n")
        if cut:
            self._file.truncate(whole)
        self._file.flush()
        self.n_failed = len(failed)
        return failed

    def _drop(self, path: Path, failed: set[str]) -> None:
        """Remove the answers of failed requests, so that these are asked again."""
        self._file.seek(0)
        with write_whole(path.absolute()) as kept:
            for line in self._file:
                if _is_good(json.loads(line)):
                    kept.write(line)
        self._file.close()
        self._file = open(path, "a+b")  # noqa: SIM115
        self._lock(path)
        self.finished -= failed
        self.n_failed = 0

    def write(self, item: Item, status: int = 0, body: bytes = b"") -> None:
        """Append the answer to a request, or its error. Raises OSError."""
        response, error = None, None
        if item.wrong is not None:
            error = {"code": item.wrong[0], "message": item.wrong[1]}
        else:
            try:
                found = json.loads(body)
            except ValueError:
                found = {"error": {"message": body.decode("utf-8", "replace")}}
            request_id = found.get("id", item.id) if isinstance(found, dict) else item.id
            response = {"status_code": status, "request_id": request_id, "body": found}
        record = {"id": item.id, "custom_id": item.custom_id, "response": response, "error": error}
        self._file.write(_line(record))
        self._file.flush()
        self.finished.add(item.key)
        self.n_failed += not _is_good(record)

    def close(self) -> None:
        """Wait until the whole file is on disk."""
        with contextlib.suppress(OSError):  # a pipe
            os.fsync(self._file.fileno())
        self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    """A record as one line, also for readers that split lines at Unicode separators."""
    text = json.dumps(record, ensure_ascii=False)
    for mark in "\x85\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # an unpaired surrogate in a custom_id, which is written as it is
        return json.dumps(record).encode() + b"\n"


def _answered(line: bytes) -> tuple[str, bool]:
    """The key of the request that a line answers, and whether it succeeded. Raises ValueError.

    Lines of OpenAI's own batches are accepted as well.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("no object")
    number, custom_id = record.get("id"), record.get("custom_id")
    response, error = record.get("response"), record.get("error")
    names = isinstance(number, str) and isinstance(custom_id, str | None)
    if not names or not isinstance(response, dict | None) or (response is None and error is None):
        raise ValueError("no answer")
    key = number if custom_id is None else Item(0, custom_id).key
    return str(key), _is_good(record)


def _was_cut(line: bytes, *, first: bool) -> bool:
    """Whether a line is the beginning of an answer that was being written.

    The first few bytes of a file do not count if any JSON could begin with them.
    """
    return line.startswith(_HEAD) or (not first and _HEAD.startswith(line))


def _is_good(record: dict[str, Any]) -> bool:
    response = record["response"]
    return (
        record.get("error") is None and response is not None and response.get("status_code") == 200
    )


async def run(
    file: BinaryIO,
    todo: list[Item],
    answers: Answers,
    ask: Ask,
    n_at_once: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Ask all of `todo`, n_at_once at a time, and write the answers.

    Prompts with a common prefix follow each other, so that it is computed once. A request that
    fails does not end the run. told(done, total) is called after each one. Raises OSError of the
    file of answers.
    """
    waiting = deque(sorted(todo, key=lambda item: (item.prefix, item.number)))
    done, total = 0, len(waiting)

    async def work() -> None:
        nonlocal done
        while waiting:
            item = waiting.popleft()
            status, body = 0, b""
            if item.wrong is None:
                file.seek(item.at)
                try:
                    record = json.loads(file.readline())
                    data = json.dumps(record["body"]).encode()
                    status, body = await _asked(ask, record["url"], data)
                except RecursionError:  # less stack is left here than where the line was checked
                    status, body = 400, b'{"error": {"message": "nested too deeply"}}'
            answers.write(item, status, body)
            done += 1
            told(done, total)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(n_at_once, total)):
            group.create_task(work())


async def _asked(ask: Ask, url: str, body: bytes) -> tuple[int, bytes]:
    """The answer to a request, which is asked again if it failed without a fault of its own."""
    for i in range(TRIES):
        try:
            status, found = await ask(url, body)
        except Lost as error:
            text = f"the request was lost {TRIES} times: {error}"
            status, found = 503, json.dumps({"error": {"message": text}}).encode()
        if status not in _PASSING or i == TRIES - 1:
            break
        await asyncio.sleep(PAUSE)
    return status, found
