"""Code of README and docs runs as it stands, over a small model; its command lines are valid."""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from doc_blocks import blocks, borders
from mmproj_files import write_mmproj
from PIL import Image
from serve_process import ServeProcess
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import _parser
from tamis.cli.commands import serve
from tamis.cli.commands.config import _check
from tamis.cli.conversation.mcp_servers import read_config
from tamis.cli.options import presets, settings
from tamis.fetch.registry import KNOWN

ROOT = Path(__file__).parents[2]
PYTHON, SHELL = blocks(ROOT, "python"), blocks(ROOT, "sh", "text")
LANGUAGES = ("python", "sh", "text", "json", "toml", "ini")  # each has a test below
SEPARATORS = ("|", "&&", ";", ">", "2>", "<")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec())


@pytest.fixture
def named(model, tmp_path, monkeypatch):
    """The current folder: models where smollm2 is a small random one, and one that sees."""
    known = replace(KNOWN["smollm2"], n_bytes=model.stat().st_size)
    monkeypatch.setitem(KNOWN, "smollm2", known)
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(model, tmp_path / known.file)
    shutil.copy(model, tmp_path / "model.gguf")
    write_mmproj(tmp_path / "mmproj-model.gguf", "gemma3", n_out=TinySpec().n_embd)
    Image.new("RGB", (80, 60), (200, 30, 90)).save(tmp_path / "page.png")
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


def test_every_block_is_of_a_language_that_is_tested():
    """A block with another mark, an indent or another fence would be run by no test."""
    found = borders(ROOT)
    opened = [line for _, line in found[::2]]
    assert {f"```{word}" for word in LANGUAGES} >= set(opened)
    bad = [place for place, line in found[1::2] if line != "```"]
    assert not bad, f"expected the end of a block, ``` alone: {', '.join(bad)}"
    assert len(opened) == len(blocks(ROOT, *LANGUAGES))


@pytest.mark.parametrize("block", blocks(ROOT, "json"), ids=lambda b: f"{b.page}:{b.line}")
def test_files_of_mcp_servers_are_read(block, tmp_path):
    (tmp_path / "servers.json").write_text(block.text)
    assert len(read_config(tmp_path / "servers.json")) == len(json.loads(block.text)["mcpServers"])


@pytest.mark.parametrize("block", blocks(ROOT, "toml"), ids=lambda b: f"{b.page}:{b.line}")
def test_settings_are_valid(block):
    found = tomllib.loads(block.text)
    if "model_providers" in found:  # another program's
        assert found["model_providers"][found["model_provider"]]["wire_api"] == "responses"
    else:
        _check(found, ROOT)


@pytest.mark.parametrize("block", blocks(ROOT, "ini"), ids=lambda b: f"{b.page}:{b.line}")
def test_presets_and_units_are_valid(block, tmp_path):
    if "ExecStart" in block.text:  # a unit of systemd
        (words,) = re.findall(r"^ExecStart=\S+/tamis (.*)$", block.text, re.M)
        _parser(words.split()).parse_args(words.split())
        return
    (tmp_path / "models.ini").write_text(block.text)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    found = presets.Presets(tmp_path / "models.ini", settings.named(parser))
    for name in re.findall(r"^\[([^*]*)\]$", block.text, re.M):
        assert presets.arguments_of(serve.add_arguments, [], found.of(name)).ctx == 8192
