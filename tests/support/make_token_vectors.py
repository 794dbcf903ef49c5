"""Write tests/data/tokens from llama.cpp's vocabularies and their token vectors (MIT licence).

python tests/support/make_token_vectors.py MODELS: the folder ``models`` of llama.cpp's sources, as
it is in the source distribution of llama-cpp-python. Of each vocabulary only the tokens and merges
are kept that may play a part in the texts: those that occur in them. Ids are counted anew.
"""

import json
import sys
import unicodedata
from pathlib import Path

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import TokenType, Vocab
from tamis.text.bpe import byte_alphabet
from tamis.text.tokenizer import tokenizer_for

FOLDER = Path(__file__).resolve().parents[1] / "data/tokens"
NAMES = ("bert-bge", "gemma-4", "llama-bpe", "deepseek-llm", "falcon", "qwen35", "command-r")
BREAK = "\n__ggml_vocab_test__\n"


def forms(texts: list[str]) -> str:
    """All that tokens of the texts may be written as."""
    letters = byte_alphabet()
    out = []
    for text in texts:
        spm = text.replace(" ", "\u2581")
        plain = "".join(
            c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c)
        )
        words = "\u2581".join(plain.lower().split())
        out += [spm, "".join(letters[b] for b in text.encode()), "\u2581" + words, words]
    return "\0".join(out)


def compact(models: Path, name: str) -> dict:
    file = models / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{file}.inp").read_bytes().decode().split(BREAK)
    with GGUFFile(file) as f:
        vocab = Vocab.from_gguf(f)
    tokenizer = tokenizer_for(vocab)
    cases = [(text, tokenizer.encode(text, add_special=False)) for text in texts]
    expected = [[*map(int, line.split())] for line in Path(f"{file}.out").read_text().split("\n")]
    assert [ids for _, ids in cases] == expected[: len(cases)], name
    everything = forms(texts)
    kept = []
    for i, text in enumerate(vocab.tokens):
        kind = vocab.token_types[i]
        alone = kind in (TokenType.BYTE, TokenType.UNKNOWN) or len(text) == 1
        inside = text in everything or text.removeprefix("\u2581") in everything
        if (
            (alone and len(text) < 7 and ord(text[0]) < 0x250)
            or inside
            or i in (vocab.unk, vocab.bos)
        ):
            kept.append(i)
    place = {old: new for new, old in enumerate(kept)}
    merges = [m for m in vocab.merges if m.replace(" ", "", 1) in everything]
    return {
        "model": vocab.model,
        "pre": vocab.pre,
        "unk": place.get(vocab.unk),
        "tokens": [[vocab.tokens[i], int(vocab.token_types[i])] for i in kept],
        "merges": merges,
        "cases": [[text, [place[i] for i in ids]] for text, ids in cases],
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        data = compact(Path(sys.argv[1]), name)
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(text + "\n")
