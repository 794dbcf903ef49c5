"""libtamis: a C program loads a model and generates the engine's text."""

import inspect
import os
import shutil
import subprocess
import sysconfig

import pytest
from tiny_models import TinySpec, write_tiny_model

import tamis.bindings.llama as api
from tamis.bindings import capi
from tamis.engine.engine import Engine

PROMPT, N = "the hand over there is of an other", 12


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of libtamis and tamis.h, made once."""
    pytest.importorskip("cffi")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("this Python has no shared library")
    from tamis.tools.build_capi import main

    folder = tmp_path_factory.mktemp("capi")
    assert main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def program(library, root, tmp_path_factory):
    """tests/data/embed.c, compiled."""
    made = tmp_path_factory.mktemp("program") / "embed"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{library}", f"-L{library}"]
    source, rpath = str(root / "tests" / "data" / "embed.c"), f"-Wl,-rpath,{library}"
    subprocess.run(["cc", *flags, source, "-ltamis", rpath, "-o", str(made)], check=True)
    return made


def test_a_c_program_generates_the_engines_text(program, tmp_path):
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    engine = Engine.load(model)
    session = engine.session(n_ctx=256)
    ids = engine.tokenizer.encode(PROMPT)
    row, greedy = session.prefill(ids), []
    for _ in range(N):
        greedy.append(int(row.argmax()))
        row = session.decode(greedy[-1])
    engine.close()

    done = subprocess.run(
        [str(program), str(model), PROMPT, str(N)],
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"]},  # this Python is not on it
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    lines = done.stdout.split(b"\n")
    by_name = {line.split(b" ")[0]: line.split(b" ")[1:] for line in lines[-7:-1]}
    assert by_name[b"position"] == [str(len(ids) + N - 1).encode()]
    assert by_name[b"state"] == [b"1", b"0"], "a damaged state is refused"
    assert by_name[b"asked"] == [b"1"]
    assert by_name[b"free"] == [b"0", b"-1"]
    assert by_name[b"chat"] == [b"52"]
    assert by_name[b"stale"][:2] == [b"-1:", b"llama_model_n_embd:"]
    tokens = [int(line.split(b" ")[0]) for line in lines if line[:1].isdigit()]
    assert tokens == greedy


def test_a_file_that_is_no_model_ends_with_the_reason(program, tmp_path):
    done = subprocess.run(
        [str(program), str(tmp_path / "none.gguf"), "x", "1"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"none.gguf" in done.stderr


def test_every_declared_function_has_the_flat_apis_parameters():
    for match in capi._DECLARED.finditer(capi.FUNCTIONS):
        declared = [p for p in match["parameters"].split(", ") if p != "void"]
        own = inspect.signature(getattr(api, match["name"])).parameters
        assert len(own) == len(declared), match["name"]
