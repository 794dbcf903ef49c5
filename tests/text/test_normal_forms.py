"""Texts in Unicode's normal forms, and the tokens of models whose tokenizers compose them."""

import random
import time
import unicodedata

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from vocabularies import make_vocab

from tamis.bindings.serve.text import BoundedTokenizer, TooManyTokens
from tamis.formats.vocab import TokenType
from tamis.sampling.grammar import GrammarTokenizer
from tamis.text import pretokenize
from tamis.text.bpe import byte_alphabet
from tamis.text.pretokenize import normalized
from tamis.text.tokenizer import tokenizer_for

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "cafe\u0301",  # an accent apart
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Hangul in letters
    "Vie\u0323\u0302t",  # two accents, of which the first in order is the lower
    "Vie\u0302\u0323t",
    "\u212b \u2126",  # signs that are letters: singletons
    "\u0958 \ufb2a",  # that stay apart when composed
    "\u00bd \ufb01 \u2460",  # of compatibility only: they stay
    "\U0001d15e\u0344",
    "a\u0315\u0300\u05ae\u0300b",
]


def mended(word):
    """The bytes of a text in GPT-2's alphabet."""
    return "".join(byte_alphabet()[byte] for byte in word.encode())


def vocab(pre):
    """A token a byte, and tokens of composed characters."""
    tokens, merges = list(byte_alphabet()), []
    for text in ("\u00e9", "\u1ec7", "\u00c5", "\u03a9", "\ud55c"):
        letters = mended(text)
        for i in range(1, len(letters)):
            merges.append(f"{letters[:i]} {letters[i]}")
            tokens.append(letters[: i + 1])
    merges = list(dict.fromkeys(merges))
    tokens = list(dict.fromkeys(tokens))
    return make_vocab("gpt2", [(t, TokenType.NORMAL) for t in tokens], merges=merges, pre=pre)


def of_hugging_face(of):
    """Hugging Face's tokenizer of a vocabulary, as Qwen2's tokenizer.json sets it up."""
    merges = [tuple(merge.split(" ")) for merge in of.merges]
    found = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(of.tokens)}, merges))
    found.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_composed_and_decomposed_texts_have_the_tokens_of_hugging_face(text):
    qwen = vocab("qwen2")
    ours, theirs = tokenizer_for(qwen), of_hugging_face(qwen)
    for each in (text, unicodedata.normalize("NFD", text), unicodedata.normalize("NFC", text)):
        assert ours.encode(each) == theirs.encode(each).ids, ascii(each)
        parts = [("x ", False), (each, False), (" y", True)]
        assert ours.encode_parts(parts) == theirs.encode(f"x {each} y").ids


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "command-r", "mpt", "olmo", "modern-bert"])
def test_families_whose_models_have_read_composed_texts(pre):
    composing = tokenizer_for(vocab(pre))
    for text in TEXTS:
        composed = composing.encode(unicodedata.normalize("NFC", text))
        assert composing.encode(text) == composed
        assert composing.decode(composing.encode(text, compose=False)) == text, "to the byte"


@pytest.mark.parametrize("pre", sorted({"llama-bpe", "gpt-2", "smollm", "deepseek-v3", "tekken"}))
def test_others_read_texts_as_they_are(pre):
    assert pre not in pretokenize.COMPOSED
    plain = tokenizer_for(vocab(pre))
    for text in TEXTS:
        assert plain.decode(plain.encode(text)) == text


def test_the_limit_of_a_context_counts_composed_characters():
    """Decomposed Hangul has three times the bytes of the tokens that it becomes."""
    qwen = vocab("qwen2")
    bounded = BoundedTokenizer(tokenizer_for(qwen), qwen, 10)
    text = "\u1112\u1161\u11ab" * 10
    assert len(bounded.encode(text)) == 10
    with pytest.raises(TooManyTokens):
        bounded.encode(text * 4)  # a token of three bytes, and three times as many before


def test_grammars_see_the_bytes_of_their_texts():
    """llguidance asks for the tokens of bytes that it forces: others would not fit them."""
    pytest.importorskip("llguidance")
    qwen = vocab("qwen2")
    ours = tokenizer_for(make_vocab("gpt2", [(t, TokenType.NORMAL) for t in qwen.tokens], eog={0}))
    seen = GrammarTokenizer(ours, len(qwen))
    for text in TEXTS:
        assert b"".join(ours.piece(i) for i in seen(text)) == text.encode()


def test_normal_forms_are_unicodes():
    rng = random.Random(1)
    letters = "ab \u00e9\u1100\u1161\u11a8\u0301\u0323\u0308\u0345\u05ae\u212b\u0958\U0001d15e"
    for _ in range(500):
        text = "".join(rng.choices(letters, k=rng.randint(0, 40)))
        for form in ("NFC", "NFD"):
            assert normalized(form, text) == unicodedata.normalize(form, text)


def test_a_text_of_marks_takes_time_by_its_length():
    marks = "a" + "\u0301\u0316" * 200_000
    begin = time.perf_counter()
    found = [normalized(form, marks) for form in ("NFC", "NFD")]
    assert time.perf_counter() - begin < 5, "the square of it would take hours"
    assert sorted(found[1]) == sorted(marks)
