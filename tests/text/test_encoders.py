"""Vocabularies that are not BPE: against a search of all cuts, and by examples."""

import contextlib
import itertools
import random
import struct

import pytest
import tokenizers
from pace import within
from tokenizers import models, normalizers, pre_tokenizers
from vocabularies import make_vocab

from tamis.formats.vocab import Normalizer, TokenType
from tamis.text.charsmap import CharacterMap, _n_bytes
from tamis.text.longest_match import unescaped
from tamis.text.tokenizer import TokenizerError, tokenizer_for
from tamis.text.wordpiece import _is_ideograph

NORMAL, UNKNOWN, CONTROL = TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL
PIECES = {"\u2581": -3.0, "a": -2.0, "b": -2.5, "ab": -3.5, "\u2581a": -4.0, "bb": -4.9, "aba": -6}


def cuts(text):
    """All ways to cut ``text`` into pieces."""
    if not text:
        yield ()
    for n in range(1, len(text) + 1):
        if text[:n] in PIECES:
            yield from ((text[:n], *rest) for rest in cuts(text[n:]))


def unigram(**changes):
    tokens = [("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
    tokens += [(text, NORMAL) for text in PIECES]
    scores = [0.0, 0.0, 0.0, *PIECES.values()]
    return tokenizer_for(
        make_vocab("t5", tokens, scores=scores, unk=2, eos=1, add_space_prefix=True, **changes)
    )


def test_unigram_takes_the_cut_of_the_highest_score():
    t, rng = unigram(), random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices("ab ", k=rng.randint(1, 9)))
        ids = t.encode(text, add_special=False)
        pieces = [t._vocab.tokens[i] for i in ids]
        spaced = text.replace(" ", "\u2581")
        words = spaced if text[0] == " " and not text.strip() else None
        first = next((i for i, c in enumerate(text) if c != " "), len(text))
        words = words or spaced[:first] + "\u2581" + spaced[first:]
        best = max(sum(PIECES[p] for p in cut) for cut in cuts(words))
        assert "".join(pieces) == words
        assert sum(PIECES[p] for p in pieces) == pytest.approx(best)


def test_adjacent_unknown_characters_are_one_token_and_the_end_is_added():
    t = unigram()
    assert t.encode("xyza")[1:] == [2, 4, 1]
    merged = unigram(normalizer=Normalizer(merge_spaces=True))
    assert merged.encode("  a   b ") == merged.encode("a b")


def test_wordpiece_takes_the_longest_pieces_or_the_word_is_unknown():
    tokens = [("[UNK]", UNKNOWN), ("[CLS]", CONTROL), ("[SEP]", CONTROL)]
    words = ["\u2581un", "able", "\u2581a", "ff", "\u2581,", "\u2581我", "\u2581zoe"]
    tokens += [(text, NORMAL) for text in words]
    t = tokenizer_for(make_vocab("bert", tokens, bos=1, sep=2, unk=0))
    assert t.encode("Unaffable") == [1, 0, 2]  # "affable" is no continuation of pieces
    assert t.encode("UNable, a我ZOË") == [1, 3, 4, 7, 5, 8, 9, 2]
    assert t.encode("[SEP]", add_special=False) == [0, 0, 0]
    assert t.encode("[SEP]", add_special=False, parse_special=True) == [2]


def test_wordpiece_reads_words_as_berts_own_tokenizer_does():
    """Of marks only those without room of their own are accents, and long words are unknown."""
    words = [("[UNK]", UNKNOWN), *((f"\u2581{c}", NORMAL) for c in "ae"), ("a", NORMAL)]
    words += [("\u0915", NORMAL), ("\u2581\u0915\u093f", NORMAL)]  # ka, and ki with its sign (Mc)
    vocab = make_vocab("bert", words, unk=0)
    ours = tokenizer_for(vocab)
    texts = [
        text.removeprefix("\u2581") if text[0] == "\u2581" else f"##{text}" for text, _ in words
    ]
    texts[0] = "[UNK]"
    ids = {text: i for i, text in enumerate(texts)}
    theirs = tokenizers.Tokenizer(
        models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    theirs.normalizer = normalizers.BertNormalizer(lowercase=True)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    long = ["a" * 100, "a" * 101, "a\u0301" * 100, "a\u0301" * 101]
    for text in ("\u00e9", "e\u0301", "\u0915\u093f", "\u0915\u093f\u0902", "a\u0488", *long):
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids, ascii(text)


def test_rwkv_takes_the_longest_token_at_each_place():
    texts = ["a", "ab", "abc", "\\n", "\\xe6\\x88", "\\x91", "\\\\"]
    tokens = [("<s>", CONTROL), *((text, NORMAL) for text in texts)]
    t = tokenizer_for(make_vocab("rwkv", tokens, unk=0))
    assert t.encode("abcaab\n我\\") == [3, 1, 2, 4, 5, 6, 7]
    assert t.decode([3, 5, 6, 4, 7]) == "abc我\n\\"
    assert t.encode("<s>") == [0, 0, 0]  # unknown bytes, not the control token


def test_plamo_takes_the_best_cut_and_bytes_for_the_rest():
    tokens = [("<|plamo:bos|>", CONTROL), ("a", NORMAL), ("b", NORMAL), ("ab", NORMAL)]
    tokens += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    scores = [0.0, -1.0, -1.0, -2.0, *[0.0] * 256]
    t = tokenizer_for(make_vocab("plamo2", tokens, scores=scores))
    assert t.encode("ab") == [3]  # of equal sums the longer piece
    assert t.encode("\ufeffaé") == [1, 4 + 0xC3, 4 + 0xA9]
    with pytest.raises(TokenizerError, match="all 256"):
        tokenizer_for(make_vocab("plamo2", tokens[:-1], scores=scores[:-1]))
    assert tokenizer_for(make_vocab("plamo2", tokens)).encode("ab") == [3]  # without scores, too


def test_dna_is_read_six_letters_at_a_time():
    mark = "\ue000"
    names = ["<dna>", "</dna>", "<oov>", "ACGTAC" + mark, "GTAAAA" + mark, "x"]
    t = tokenizer_for(make_vocab("hybriddna", [(name, NORMAL) for name in names]))
    assert t.encode("x<dna>acgtacGT</dna>x<dna>N") == [5, 0, 3, 4, 1, 5, 0, 2]
    assert t.piece(3) == b"ACGTAC"


def test_white_space_beside_some_tokens_is_theirs():
    tokens = [("a", NORMAL), ("b", NORMAL), ("<|x|>", CONTROL)]
    t = tokenizer_for(make_vocab("gpt2", tokens, rstrip=frozenset([2])))
    assert t.encode("a<|x|> \nb", parse_special=True) == [0, 2, 1]


@pytest.mark.parametrize("blob", [b"\1", b"\4\0\0\0", b"\4\0\0\0\0\0\0\0x", b"\xff" * 64])
def test_broken_maps_of_characters_are_refused(blob):
    with pytest.raises(ValueError, match="charsmap"):
        CharacterMap(blob).apply("abc")


def charsmap(texts):
    """The file's form of a map: a double array of the keys' bytes, and what replaces them."""
    units, out, at = [0] * 8192, b"", 256
    units[0] = at << 10
    keys = {key.encode(): new for key, new in texts.items()}
    for key, new in keys.items():
        node = 0 ^ at
        for i, byte in enumerate(key):
            node ^= byte
            base = 256 << (i + 1)
            is_leaf = key[: i + 1] in keys
            units[node] = byte | is_leaf << 8 | base << 10
            node ^= base
            if is_leaf:
                units[node] = 1 << 31 | len(out) if key[: i + 1] == key else units[node]
        out += new.encode() + b"\0"
    return CharacterMap(struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + out)


def test_a_replacement_that_lies_outside_of_the_map_is_refused():
    whole = charsmap({"a": "x"})
    assert whole.apply("ab") == "xb"
    for texts in (b"", b"x"):  # none where it should begin, and one without an end
        whole._texts = texts
        with pytest.raises(ValueError, match="has a replacement outside of itself"):
            whole.apply("ab")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", "x"), ("ab", "yz"), ("aab", "xyz"), ("abc", "yz"), ("c", ""), ("dad", "dxd"),
     ("é我a😀", "é我x😀"), ("cba", "bx"), ("", "")],
)  # fmt: skip
def test_the_longest_sequence_at_each_place_is_replaced(text, expected):
    assert charsmap({"a": "x", "ab": "yz", "c": ""}).apply(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("éè", "eè"), ("èé", "èe"), ("我们", "我们"), ("\u6212x", "ix"), ("ö", "ö")],
)
def test_a_character_that_begins_like_a_sequence_stays(text, expected):
    assert charsmap({"é": "e", "\u6212": "i"}).apply(text) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [(r"a\nb", b"a\nb"), (r"\t\r", b"\t\r"), (r"\\\'\q", b"\\'q"), (r"\xe6\x0A\xFf", b"\xe6\n\xff"),
     ("end\\", b"end\\"), (r"\x4", b"x4"), (r"\x41", b"A"), (r"\x414", b"A4"), ("", b"")],
)  # fmt: skip
def test_bytes_of_rwkvs_tokens(written, expected):
    assert unescaped(written.encode()) == expected


BLOCKS = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B81F),
          (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]  # fmt: skip


@pytest.mark.parametrize(("first", "last"), BLOCKS)
def test_ideographs_are_words_of_their_own_to_the_ends_of_their_blocks(first, last):
    """As Hugging Face's BertNormalizer has the blocks; two of them touch."""
    assert [_is_ideograph(code) for code in (first - 1, first, last, last + 1)] == [
        any(a <= first - 1 <= b for a, b in BLOCKS), True, True,
        any(a <= last + 1 <= b for a, b in BLOCKS),
    ]  # fmt: skip


def test_bytes_of_a_character_by_its_first():
    leads = [0x00, 0x41, 0xBF, 0xC0, 0xDF, 0xE0, 0xEF, 0xF0, 0xF4]
    assert [_n_bytes(lead) for lead in leads] == [1, 1, 1, 2, 2, 3, 3, 4, 4]


def test_any_map_of_characters_ends():
    rng = random.Random(1)
    for _ in range(300):
        units = bytes(rng.choices(range(256), k=4 * rng.randint(1, 600)))
        blob = struct.pack("<I", len(units)) + units + b"ab\0"
        with contextlib.suppress(ValueError):
            found = CharacterMap(blob).apply("abc é 我" * 3)
            # A character stays or becomes one of the blob's texts: "ab", "b" or none.
            assert set(found) <= set("abc é 我")
            assert len(found) <= 2 * len("abc é 我" * 3)


@pytest.mark.parametrize("kind", ["a", "ab", " ", "ba ", "x", "我"])
def test_a_long_text_is_encoded_in_time_in_proportion(kind):
    tokens = [("[UNK]", UNKNOWN), *((text, NORMAL) for text in PIECES)]
    wordpiece = tokenizer_for(make_vocab("bert", tokens, bos=0, sep=0, unk=0))
    for t in (unigram(), wordpiece):
        with within(3):
            t.encode(kind * (100_000 // len(kind)))


def test_every_kind_of_vocabulary_can_be_without_unknown_token():
    for model, text in itertools.product(["bert", "t5", "rwkv"], ["x", ""]):
        tokens = [("a", NORMAL)]
        assert tokenizer_for(make_vocab(model, tokens, add_eos=False)).encode(text) == []
