"""llama.cpp's token vectors, on the parts of its vocabularies that they need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vocabularies import make_vocab

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.text.tokenizer import tokenizer_for

FILES = sorted((Path(__file__).resolve().parents[1] / "data/tokens").glob("*.json"))
BREAK = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_texts_have_the_tokens_that_llama_cpp_lists(file):
    data = json.loads(file.read_text())
    vocab = make_vocab(
        data["model"], data["tokens"], pre=data["pre"], merges=data["merges"], unk=data["unk"]
    )
    tokenizer = tokenizer_for(vocab)
    for text, ids in data["cases"]:
        # llama.cpp composes no characters, as Qwen's own tokenizer does.
        assert tokenizer.encode(text, add_special=False, compose=False) == ids, text


def _models() -> Path:
    """llama.cpp's folder of vocabularies, out of a source distribution that pip fetches once."""
    cache = Path.home() / ".cache/tamis/llama_cpp_python"
    if not list(cache.glob("*/vendor/llama.cpp/models")):
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        pip += ["--no-build-isolation", "-q", "-d", str(cache), "llama-cpp-python"]
        subprocess.run(pip, check=True)
        for archive in cache.glob("*.tar.gz"):
            subprocess.run(["tar", "xf", str(archive), "-C", str(cache)], check=True)
    return next(cache.glob("*/vendor/llama.cpp/models"))


@pytest.mark.skipif(
    not os.environ.get("TAMIS_TEST_VOCABULARIES"),
    reason="fetches 70 MB of sources: set TAMIS_TEST_VOCABULARIES=1, or to the folder they are in",
)
def test_all_vocabularies_of_llama_cpp_give_its_tokens():
    given = Path(os.environ["TAMIS_TEST_VOCABULARIES"])
    files = sorted((given if given.is_dir() else _models()).glob("ggml-vocab-*.gguf"))
    n_cases = 0
    for file in files:
        with GGUFFile(file) as f:
            tokenizer = tokenizer_for(Vocab.from_gguf(f))
        if not Path(f"{file}.inp").exists():
            continue
        texts = Path(f"{file}.inp").read_bytes().decode().split(BREAK)
        lines = Path(f"{file}.out").read_text().split("\n")
        for text, line in zip(texts, lines, strict=False):
            ids = tokenizer.encode(text, add_special=False, compose=False)
            assert ids == [*map(int, line.split())], (file.name, text)
            n_cases += 1
    assert n_cases > 700
