"""Batches in OpenAI's form: a file of requests, a line each, and a file of their answers.

The answers' file is the only state: what it has is finished, and a run that was cut off goes on
from there. Answers come in the order in which they are done.
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
TRIES = 3  # of a request that failed for a reason that is not its own
PAUSE = 1.0  # seconds before the next one
_PASSING = {429, 500, 502, 503, 504}
_FIRST = 1024  # characters of a prompt that are kept to sort by
_HEAD = b'{"id": "batch_req_'  # begins every line that is written here


class BatchError(ValueError):
    """A file that cannot be used; the message says which, and what to do."""


class Lost(Exception):
    """Who was to answer is no more: the request is another's."""


class Item(NamedTuple):
    """A line of the requests."""

    number: int  # from 1
    custom_id: str | None
    at: int = 0  # its first byte in the file
    prefix: bytes = b""  # sorts prompts that begin equally next to each other
    wrong: tuple[str, str] | None = None  # code and message of what cannot be asked

    @property
    def id(self) -> str:
        """What its answer is called."""
        return f"batch_req_{self.number}"

    @property
    def key(self) -> str:
        """What tells whether it is finished."""
        return self.id if self.custom_id is None else f"custom {self.custom_id}"


Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]  # URL and body: status and body


def items(file: BinaryIO) -> Iterator[Item]:
    """The requests of a file; empty lines are none."""
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
    """What prompts are sorted by: the URL, their first characters, digests of longer prefixes."""
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
    """The file of the answers, which one process writes.

    What an earlier run has written is finished; a last line that was cut off is removed, where it
    begins as an answer that is written here. Raises BatchError where another process writes it, or
    a line of it is no answer: a file that was named by mistake stays as it is.
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
        """Note what is finished, and mend the end; the keys of what failed.

        The file is changed last, once all of it is known to be answers.
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
        """Remove the answers that are none, so that they are asked for again."""
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
        """Add the answer to a request, or what was wrong with it. Raises OSError."""
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
        """Wait until all of it is on the disk."""
        with contextlib.suppress(OSError):  # a pipe
            os.fsync(self._file.fileno())
        self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    """A record as a line, also for readers that end lines where Unicode does."""
    text = json.dumps(record, ensure_ascii=False)
    for mark in "\x85\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in a custom_id, which stays as it is
        return json.dumps(record).encode() + b"\n"


def _answered(line: bytes) -> tuple[str, bool]:
    """The key of the request that a line answers, and whether by a good answer. Raises ValueError.

    A line of OpenAI's own batches is one as well.
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

    The few bytes of a file's first line that any JSON begins with are nobody's for sure.
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
    """Ask for all of `todo`, n_at_once at a time, and write the answers.

    Prompts that begin equally follow each other: what they share is then read once. A request that
    fails does not end the run. told(done, total) after each. Raises OSError of the answers' file.
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
                except RecursionError:  # the stack is lower here than where the line was checked
                    status, body = 400, b'{"error": {"message": "nested too deeply"}}'
            answers.write(item, status, body)
            done += 1
            told(done, total)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(n_at_once, total)):
            group.create_task(work())


async def _asked(ask: Ask, url: str, body: bytes) -> tuple[int, bytes]:
    """The answer to a request, which is asked again where it failed for no reason of its own."""
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
