"""Code of README and docs runs as it stands, over a small model; its command lines are valid."""

import contextlib
import io
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from doc_blocks import blocks
from serve_process import ServeProcess
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import _parser
from tamis.fetch.registry import KNOWN

ROOT = Path(__file__).parents[2]
PYTHON, SHELL = blocks(ROOT, "python"), blocks(ROOT, "sh", "text")
SEPARATORS = ("|", "&&", ";", ">", "2>", "<")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec())


@pytest.fixture
def named(model, tmp_path, monkeypatch):
    """A folder of models where smollm2 is a small random model; it is the current one."""
    known = replace(KNOWN["smollm2"], n_bytes=model.stat().st_size)
    monkeypatch.setitem(KNOWN, "smollm2", known)
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(model, tmp_path / known.file)
    return tmp_path


def run(block):
    said = io.StringIO()
    code = compile("\n" * block.line + block.text, str(ROOT / block.page), "exec")
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "__main__"})
    return said.getvalue()


@pytest.mark.parametrize(
    "block", [b for b in PYTHON if "openai" not in b.text], ids=lambda b: f"{b.page}:{b.line}"
)
def test_python_code_runs_and_prints(named, block):
    assert run(block)


@pytest.mark.slow
def test_the_code_of_the_server_runs_and_prints(named, model):
    (block,) = [b for b in PYTHON if "openai" in b.text]
    with ServeProcess(model, named) as server:
        local = block._replace(text=block.text.replace(":8080/", f":{server.port}/"))
        assert local != block
        assert run(local)


def test_the_pages_have_code():
    assert {block.page for block in PYTHON} >= {"README.md", "docs/guides/python.md"}
    assert len(commands()) > 20


def commands():
    """The command lines of tamis: (page, words)."""
    found = []
    for block in SHELL:
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            if block.language == "text" and not line.startswith("$ "):
                continue  # output
            words = shlex.split(re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")))
            while "tamis" in words:
                words = words[words.index("tamis") + 1 :]
                end = next((i for i, word in enumerate(words) if word in SEPARATORS), len(words))
                if words[:1] and words[0].isalpha():
                    found.append((block.page, words[:end]))
    return found


@pytest.mark.parametrize(("page", "words"), commands())
def test_command_lines_are_valid(page, words):
    status = 0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            _parser(words).parse_args(words)
        except SystemExit as error:
            status = error.code
    assert status == 0, f"{page}: tamis {shlex.join(words)}: {said.getvalue()}"
