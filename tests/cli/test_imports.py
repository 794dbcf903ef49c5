"""What `tamis run` imports before it reads the model: a wrong path or file is reported soon."""

import os
import subprocess
import sys

import pytest
from tiny_models import TinySpec, write_tiny_model

# Prints the modules of tamis at the moment the model's file is opened, and ends there.
PROBE = """
import os, sys

def at_load(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".gguf"):
        print(*sorted(m for m in sys.modules if m.split(".")[0] == "tamis"), flush=True)
        os._exit(0)

sys.addaudithook(at_load)
from tamis.cli import main

main(["run", "-m", sys.argv[1], "-p", "hello", *sys.argv[2:]])
"""
MOST = 101  # files, six of them for pictures' rows; there were 141


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("imports") / "tiny.gguf"
    write_tiny_model(path, TinySpec())
    return path


def modules_at_load(model, *flags):
    command = [sys.executable, "-c", PROBE, str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    return done.stdout.split()


def test_few_files_are_imported_before_the_model_is_loaded(model):
    found = modules_at_load(model)
    assert 30 < len(found) <= MOST, "\n".join(found)


def test_dense_attention_imports_no_other_method(model):
    found = modules_at_load(model, "--attn", "dense")
    methods = {m for m in found if m.startswith("tamis.select.")}
    assert methods == {f"tamis.select.{name}" for name in ("base", "dense", "notation")}
    ops = {m for m in found if m.startswith("tamis.jit_kernels.contract.ops.select.")}
    assert ops == {"tamis.jit_kernels.contract.ops.select.common"}


def test_nothing_that_a_session_needs_is_imported_before_the_model_is_loaded(model):
    packages = ("tamis.graph", "tamis.engine.session", "numba", "llvmlite")
    assert not [m for m in modules_at_load(model) if m.startswith(packages)]
