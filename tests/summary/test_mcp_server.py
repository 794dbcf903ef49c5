"""Documents as tools for agents: what a client gets and may read, and what cancelling ends."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import anyio
import pytest
from mcp.client.client import Client

from tamis.cli import main
from tamis.engine.errors import ContextError
from tamis.summary import mcp_server
from tamis.summary.cache import Cache
from tamis.summary.mcp_server import Documents, server_of
from tamis.summary.meter import Work
from tamis.summary.plan import Settings
from tamis.summary.summarize import Summary

SOURCE = {"file": "a.txt", "line": 2, "start": 5, "end": 9, "quote": "1874", "part": 1}


def summary(text, **changed):
    numbers = dict.fromkeys(
        ("n_cut", "n_tokens", "n_parts", "n_levels", "n_read", "n_kept", "n_written", "n_ctx"), 1
    )
    found = {"name": "a.txt", "text": text, "finish": "stop", "method": "dense", "model": "m"}
    return Summary(**(found | numbers | {"seconds": 1.239} | changed))


class Scribe:
    """A Summarizer whose answer is its task; `errors` are raised, `slow` waits to be stopped."""

    errors: ClassVar[list[Exception]] = []
    slow = False
    running = threading.Event()
    ended = threading.Event()

    def __init__(self, engine, settings, cache):
        self._task = settings.task

    def summarize(self, document, watch):
        if self.errors:
            raise self.errors.pop()
        watch.meter.expect(document.name, [Work(100, 10)])
        watch.meter.begin(document.name, Work(100, 10))
        watch.meter.read(document.name, 50)
        type(self).running.set()
        try:
            while self.slow:
                watch.check()
                time.sleep(0.01)
        finally:
            type(self).ended.set()
        return summary(f"{self._task.question or self._task.instruction}, {len(document.text)}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_server, "Summarizer", Scribe)
    monkeypatch.setattr(Scribe, "errors", [])
    monkeypatch.setattr(Scribe, "slow", False)
    monkeypatch.setattr(Scribe, "running", threading.Event())
    monkeypatch.setattr(Scribe, "ended", threading.Event())
    served = tmp_path / "served"
    (served / "sub").mkdir(parents=True)
    (served / "a.txt").write_text("Built in\n1874.")
    (served / "sub" / "b.md").write_text("# B")
    (tmp_path / "secret.txt").write_text("secret")
    (served / "link.txt").symlink_to(tmp_path / "secret.txt")
    return served


def documents(folder, engines=None, cache=None):
    def load():
        engine = SimpleNamespace(close=lambda: None)
        if engines is not None:
            engines.append(engine)
        return engine

    model = folder.parent / "m.gguf"
    model.write_bytes(b"weights")
    return Documents([folder], load, model, Settings(), cache, lambda line: None)


def call(served, name, **arguments):
    async def ask():
        async with Client(server_of(served)) as client:
            return await client.call_tool(name, arguments)

    return anyio.run(ask)


def test_tools_say_what_they_do_and_take(folder):
    async def listed():
        async with Client(server_of(documents(folder))) as client:
            return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in anyio.run(listed)}
    assert sorted(tools) == ["ask_document", "summarize_document"]
    schema = tools["ask_document"].input_schema
    assert schema["required"] == ["path", "question"]
    assert schema["properties"]["words"]["maximum"] == mcp_server.MAX_WORDS
    assert "found" in tools["ask_document"].output_schema["properties"]
    assert all(tool.description for tool in tools.values())


def test_an_answer_has_its_sources(folder, monkeypatch):
    answer = summary("1874 [1]", sources=[SOURCE], found=True)
    monkeypatch.setattr(Scribe, "summarize", lambda self, document, watch: answer)
    result = call(documents(folder), "ask_document", path="a.txt", question="When?")
    assert not result.is_error
    assert result.structured_content == {
        "text": "1874 [1]", "found": True, "n_tokens": 1, "seconds": 1.24,
        "sources": [SOURCE | {"page": None}],
    }  # fmt: skip


def test_the_model_is_loaded_once_and_only_when_it_is_needed(folder):
    engines = []
    served = documents(folder, engines)
    assert not engines
    for path, text in (("a.txt", "When?, 14"), (str(folder / "sub" / "b.md"), "When?, 3")):
        result = call(served, "ask_document", path=path, question="When?")
        assert result.structured_content["text"] == text
    assert len(engines) == 1
    result = call(served, "summarize_document", path="sub/b.md", instruction="List names.")
    assert result.structured_content["text"] == "List names., 3"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("../secret.txt", "outside of the folders"),
        ("/etc/passwd", "outside of the folders"),
        ("link.txt", "outside of the folders"),
        ("none.txt", "no file"),
        ("sub", "no file"),
        ("a\0b", "zero byte"),
    ],
)
def test_only_files_of_the_folders_are_read(folder, path, expected):
    engines = []
    result = call(documents(folder, engines), "ask_document", path=path, question="When?")
    assert result.is_error
    assert expected in result.content[0].text
    assert not engines


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("ask_document", {"question": "  "}, "the question is empty"),
        ("ask_document", {"question": ""}, "question"),
        ("ask_document", {"question": "x", "words": 0}, "words"),
        ("summarize_document", {"instruction": " "}, "the instruction is empty"),
    ],
)
def test_arguments_that_ask_nothing_are_refused(folder, name, arguments, expected):
    result = call(documents(folder), name, path="a.txt", **arguments)
    assert result.is_error
    assert expected in result.content[0].text


def test_an_error_is_reported_and_the_next_call_is_answered(folder):
    Scribe.errors = [ContextError("100 tokens do not fit")]
    served = documents(folder)
    result = call(served, "ask_document", path="a.txt", question="When?")
    assert result.is_error
    assert "100 tokens do not fit" in result.content[0].text
    assert not call(served, "ask_document", path="a.txt", question="When?").is_error


def test_a_call_that_is_cancelled_ends_the_work(folder, monkeypatch):
    monkeypatch.setattr(Scribe, "slow", True)
    served = documents(folder)

    async def leave():
        async with Client(server_of(served)) as client:
            with anyio.move_on_after(30):
                async with anyio.create_task_group() as group:
                    arguments = {"path": "a.txt", "question": "When?"}
                    group.start_soon(client.call_tool, "ask_document", arguments)
                    assert await anyio.to_thread.run_sync(Scribe.running.wait, 20)
                    group.cancel_scope.cancel()
            assert await anyio.to_thread.run_sync(Scribe.ended.wait, 20)

    anyio.run(leave)
    monkeypatch.setattr(Scribe, "slow", False)
    assert not call(served, "ask_document", path="a.txt", question="When?").is_error


def test_progress_is_reported_while_a_document_is_read(folder, monkeypatch):
    monkeypatch.setattr(Scribe, "slow", True)
    monkeypatch.setattr(mcp_server, "EVERY", 0.01)
    reports = []

    async def ask():
        async def progress(done, total, message):
            reports.append((done, total, message))
            monkeypatch.setattr(Scribe, "slow", False)

        async with Client(server_of(documents(folder))) as client:
            arguments = {"path": "a.txt", "question": "When?"}
            return await client.call_tool("ask_document", arguments, progress_callback=progress)

    assert not anyio.run(ask).is_error
    done, total, message = reports[0]
    assert 0 < done < total == 1
    assert message.endswith(" s left")


def test_what_was_answered_before_needs_no_model(folder, tmp_path, monkeypatch):
    answered = summary("1874")
    monkeypatch.setattr(mcp_server, "finished", lambda *_: answered)
    engines = []
    served = documents(folder, engines, Cache(tmp_path / "cache"))
    result = call(served, "ask_document", path="a.txt", question="When?")
    assert result.structured_content["text"] == "1874"
    assert not engines


def test_a_folder_that_is_none_is_a_usage_error(tmp_path, capsys):
    assert main(["mcp", str(tmp_path / "none"), "-m", "smollm2"]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_closing_frees_the_model(folder):
    closed = []
    served = Documents(
        [folder], lambda: SimpleNamespace(close=lambda: closed.append(1)), Path("m"), Settings(),
        None, lambda line: None,
    )  # fmt: skip
    served.close()
    assert not closed
    call(served, "ask_document", path="a.txt", question="When?")
    served.close()
    served.close()
    assert closed == [1]
