"""Rules of vocabularies one by one: what is added to a text, what is cut out, what wins."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import make_vocab

from tamis.formats.strings import Strings
from tamis.formats.vocab import Normalizer, TokenType, byte_of_token
from tamis.text import bpe, detokenize, pair, plamo, pretokenize, spm, tokenizer, wordpiece
from tamis.text.bpe import BytePairEncoder, CharacterPairEncoder, byte_alphabet
from tamis.text.tokenizer import TokenizerError, _Cutter, tokenizer_for

NORMAL, CONTROL, USER = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED
UNKNOWN, UNUSED, UNDEFINED, BYTE = (
    TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED, TokenType.BYTE
)  # fmt: skip
BYTES = [(letter, NORMAL) for letter in byte_alphabet()]


# --- what is added --------------------------------------------------------------------------------


def small(model, **changes):
    tokens = [("<s>", CONTROL), ("</s>", CONTROL), ("<sep>", CONTROL), ("<unk>", UNKNOWN)]
    if model == "plamo2":
        tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    ids = {"bos": 0, "eos": 1, "sep": 2, "unk": 3}
    return tokenizer_for(make_vocab(model, tokens, **(ids | changes)))


@pytest.mark.parametrize(
    ("model", "given", "ids"),
    [
        ("llama", {}, [0]), ("llama", {"add_bos": False}, []), ("llama", {"add_eos": True}, [0, 1]),
        ("gpt2", {}, []), ("gpt2", {"add_bos": True}, [0]), ("gpt2", {"add_eos": True}, [1]),
        ("gpt2", {"pre": "llama-bpe"}, [0]), ("gpt2", {"pre": "llama-bpe", "add_bos": False}, []),
        ("bert", {}, [0, 2]), ("bert", {"add_eos": False}, [0, 2]), ("bert", {"add_bos": False},
                                                                     [2]),
        ("t5", {}, [1]), ("t5", {"add_eos": False}, []), ("t5", {"add_bos": True}, [0, 1]),
        ("rwkv", {"add_bos": True, "add_eos": True}, []),
        ("plamo2", {"add_bos": True, "add_eos": True}, []),
        ("gemma4", {"pre": "gemma4", "add_bos": False}, [0]), ("llama", {"bos": None}, []),
        ("t5", {"eos": None}, []),
    ],
)  # fmt: skip
def test_what_is_added_to_an_empty_text(model, given, ids):
    t = small(model, **given)
    assert t.encode("") == ids
    assert t.encode("", add_special=False) == []
    assert (t.bos, t.eos) == (given.get("bos", 0), given.get("eos", 1))
    assert t.n_vocab == len(t._vocab)


def test_pre_tokenizers_that_add_a_beginning_whatever_the_file_says():
    for pre in sorted(pretokenize.ALWAYS_ADDS_BOS):
        tokens = [("<s>", CONTROL), ("a", NORMAL)]
        t = tokenizer_for(make_vocab("gpt2", tokens, pre=pre, bos=0, add_bos=False))
        assert t.encode("a") == [0, 1]
    for pre in sorted(pretokenize.ADDS_BOS - pretokenize.ALWAYS_ADDS_BOS):
        t = tokenizer_for(make_vocab("gpt2", [("<s>", CONTROL)], pre=pre, bos=0))
        assert (t.add_bos, t.add_eos) == (True, False)


# --- what is cut out ------------------------------------------------------------------------------


def cut_by_hand(text, ids, control, closed):
    """The longest tokens first, each from left to right, none over another; as documented."""
    taken = [False] * len(text)
    found = []
    for token in sorted(ids, key=len, reverse=True):
        for at in range(len(text) - len(token) + 1):
            span = range(at, at + len(token))
            if text[at : at + len(token)] != token or any(taken[i] for i in span):
                continue
            if ids[token] in control and any(closed[i : i + 1] == b"\1" for i in span):
                continue
            for i in span:
                taken[i] = True
            found.append((at, token))
    out, end = [], 0
    for at, token in sorted(found):
        if at > end:
            out.append(text[end:at])
        out.append(ids[token])
        end = at + len(token)
    return [*out, text[end:]] if end < len(text) else out


TOKENS = {"<a>": 1, "<": 2, "<a><a>": 3, "ba": 4, "a>b": 5, "b": 6}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_tokens_are_cut_out_and_control_tokens_only_where_nothing_is_closed(data):
    names = data.draw(st.lists(st.sampled_from(sorted(TOKENS)), unique=True))
    ids = {name: TOKENS[name] for name in names}
    control = frozenset(data.draw(st.lists(st.sampled_from(sorted(TOKENS.values())))))
    text = "".join(data.draw(st.lists(st.sampled_from(["<a>", "<", "a", "b", ">"]), max_size=9)))
    closed = bytes(data.draw(st.lists(st.integers(0, 1), max_size=len(text))))
    by_length = {}
    for name in ids:
        by_length.setdefault(len(name), []).append(name)
    if any(len(each) > 1 for each in by_length.values()):
        ids = {each[0]: ids[each[0]] for each in by_length.values()}  # their order is arbitrary
    found = list(_Cutter(ids, control).cut(text, closed))
    assert found == cut_by_hand(text, ids, control, closed)


@pytest.mark.parametrize(
    ("strip", "text", "ids"),
    [
        ({}, "a <x> b", [97, 32, 256, 32, 98]),
        ({"rstrip": {256}}, "a <x> \t\n\v\f\rb", [97, 32, 256, 98]),
        ({"lstrip": {256}}, "a \t\n\v\f\r<x> b", [97, 256, 32, 98]),
        ({"lstrip": {256}, "rstrip": {256}}, " <x> <x> ", [256, 256]),
        ({"rstrip": {256}}, " <x><x> ", [32, 256, 256]),
        ({"lstrip": {256}}, "<x> b ", [256, 32, 98, 32]),
    ],
)
def test_tokens_absorb_white_space_on_their_side(strip, text, ids):
    given = {key: frozenset(value) for key, value in strip.items()}
    t = tokenizer_for(make_vocab("gpt2", [*BYTES, ("<x>", CONTROL)], **given))
    space = t.encode(" ")[0]
    found = t.encode(text, parse_special=True)
    alphabet = {ord(" "): space, 97: t.encode("a")[0], 98: t.encode("b")[0], 256: 256}
    assert found == [alphabet[i] for i in ids]
    plain = t.encode(text)
    assert t.decode(plain) == text


@pytest.mark.parametrize(
    ("text", "kind", "plain", "special"),
    [
        ("<x>", CONTROL, b"", b"<x>"), ("<x>", UNKNOWN, b"", b"<x>"), ("<x>", USER, b"<x>", b"<x>"),
        ("<x>", UNUSED, b"", b""), ("<x>", UNDEFINED, b"", b""), ("\u0120a", NORMAL, b" a", b" a"),
        ("\u3042", NORMAL, "\u3042".encode(), "\u3042".encode()), ("\udcff", USER, b"\xff",
                                                                  b"\xff"),
    ],
)  # fmt: skip
def test_the_bytes_of_a_token_are_those_of_its_kind(text, kind, plain, special):
    t = tokenizer_for(make_vocab("gpt2", [(text, kind)]))
    assert (t.piece(0), t.piece(0, special=True)) == (plain, special)
    for outside in (-1, 1):
        with pytest.raises(TokenizerError, match=f"token {outside} is outside the vocabulary of 1"):
            t.piece(outside)


@pytest.mark.parametrize(
    ("text", "kind", "data"),
    [("\u2581a", NORMAL, b" a"), ("<0x41>", BYTE, b"A"), ("<0x41>", NORMAL, b"<0x41>"),
     ("<0x4>", BYTE, b"<0x4>"), ("\u2581", USER, "\u2581".encode())],
)  # fmt: skip
def test_the_bytes_of_a_piece(text, kind, data):
    assert tokenizer_for(make_vocab("llama", [(text, kind)])).piece(0) == data


def test_the_space_before_a_text_is_taken_off_once():
    tokens = [("<s>", CONTROL), ("\u2581a", NORMAL), ("\u2581", NORMAL), ("<u>", USER)]
    t = tokenizer_for(make_vocab("llama", tokens, scores=[0.0, -1.0, -2.0, 0.0], bos=0))
    assert t.decode([1, 1]) == "a a"
    assert t.decode([0, 1, 1]) == "a a"
    assert t.decode([2, 1]) == " a"
    assert t.decode([3, 1, 1]) == "<u>a a"
    bare = tokenizer_for(make_vocab("llama", tokens, scores=[0.0] * 4, add_space_prefix=False))
    assert bare.decode([1, 1]) == " a a"


def test_a_closing_tag_is_a_control_token_unless_others_say_that_it_is_none():
    plain = [*BYTES, ("</s>", NORMAL)]
    assert tokenizer_for(make_vocab("gpt2", plain)).encode("</s>", parse_special=True) == [256]
    assert len(tokenizer_for(make_vocab("gpt2", plain)).encode("</s>")) == 4
    for name in ("<|tool_response>", "<|plamo:eos|>"):
        kept = tokenizer_for(make_vocab("gpt2", [*plain, (name, NORMAL)]))
        assert len(kept.encode("</s>", parse_special=True)) == 4
        as_text = [*BYTES, ("</s>", USER), (name, NORMAL)]
        assert tokenizer_for(make_vocab("gpt2", as_text)).encode("</s>") == [256]
    assert len(tokenizer_for(make_vocab("gpt2", [*BYTES, ("</s>", USER)])).encode("</s>")) == 4


def test_vocabularies_that_nothing_can_be_built_from():
    with pytest.raises(TokenizerError, match="tokenizer model 'other' is not supported"):
        tokenizer_for(make_vocab("other", BYTES))
    with pytest.raises(TokenizerError, match=r"names one of these.*llama-bpe"):
        tokenizer_for(make_vocab("gpt2", BYTES, pre="other"))
    for model in ("gemma4", "whitespace"):
        made = make_vocab(model, BYTES, pre=model)
        assert isinstance(tokenizer_for(made)._encoder, CharacterPairEncoder)
    assert type(tokenizer_for(make_vocab("gpt2", BYTES))._encoder) is BytePairEncoder
    broken = Normalizer(charsmap=b"\1")
    with pytest.raises(TokenizerError, match=r"the vocabulary \(t5\) cannot be used: .*charsmap"):
        tokenizer_for(make_vocab("t5", [("a", NORMAL)], normalizer=broken))


def test_half_pairs_are_replaced():
    t = tokenizer_for(make_vocab("gpt2", BYTES))
    assert t.decode(t.encode("a\ud800b")) == "a\ufffd\ufffd\ufffdb"
    assert tokenizer._well_formed("\U0001f600") == "\U0001f600"


# --- merges ---------------------------------------------------------------------------------------


def merged(letters, ranks):
    """Merging as it is defined: the lowest rank, and of equal ones the leftmost, at each step."""
    parts = list(letters)
    while True:
        found = [
            (ranks[a, b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if (a, b) in ranks
        ]
        if not found:
            return parts
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=200, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.text("abc", min_size=1, max_size=3), st.text("abc", min_size=1, max_size=3)),
        max_size=8,
    ),
    text=st.text("abc", min_size=1, max_size=10),
)
def test_merges_are_made_in_order(pairs, text):
    ranks = {pair: i for i, pair in reversed([*enumerate(pairs)])}
    names = ["a", "b", "c", *dict.fromkeys(a + b for a, b in pairs)]
    encoder = BytePairEncoder(Strings.of(names), Strings.of(f"{a} {b}" for a, b in pairs), "gpt-2")
    ids = {name: i for i, name in enumerate(names)}
    assert encoder.encode(text) == [ids[part] for part in merged(text, ranks)]


def test_a_merge_without_a_token_is_spelled_and_hidden_tokens_are_never_made():
    merges = Strings.of(["a b", "b c"])
    encoder = BytePairEncoder(Strings.of(["a", "b", "c", "bc"]), merges, "gpt-2")
    assert encoder.encode("ab") == [0, 1]
    assert encoder.encode("bc") == [3]
    hidden = BytePairEncoder(Strings.of(["a", "b", "c", "bc"]), merges, "gpt-2", frozenset([3, 0]))
    assert hidden.encode("abc") == [1, 2]


def test_letters_of_bytes():
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    same = [byte for byte, letter in enumerate(alphabet) if ord(letter) == byte]
    assert same == [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [ord(letter) for letter in alphabet if ord(letter) > 255]
    assert others == [*range(256, 256 + 256 - len(same))]


def test_words_of_characters():
    space = "\u2581"
    names = ["a", "b", space, f"{space}a", "\n\n", "<0x0A>", "<0xC3>", "<0xA9>"]
    merges = Strings.of([f"{space} a", f"a {space}", "\n \n"])
    encoder = CharacterPairEncoder(Strings.of(names), merges, "gemma4")
    assert encoder.encode("a ab") == [0, 3, 1]
    assert encoder.encode("\u00e9") == [6, 7]
    assert encoder.encode("\n") == [5]
    assert encoder.encode("\n\n") == [4]
    found = bpe._before_spaces(Strings.of([f"a {space}", f"{space} b", f"bc{space} d", "x y"]))
    assert found == {"a", "c"}
    assert bpe._before_spaces(Strings.of([f"{space} {space}"])) == set()
    words = CharacterPairEncoder(
        Strings.of(["ab", "a", "b"]), Strings.of(["a b"]), "whitespace", lowercase=True
    )
    assert words.encode(" AB \u3000b") == [0, 2]
    kept = CharacterPairEncoder(Strings.of(["a", "A"]), Strings.of([]), "whitespace")
    assert kept.encode("A a") == [1, 0]


# --- pieces by score ------------------------------------------------------------------------------


def unigram(pieces, **changes):
    tokens = [("<unk>", UNKNOWN), *((text, kind) for text, kind, _ in pieces)]
    scores = [0.0, *(score for _, _, score in pieces)]
    given = {"scores": scores, "unk": 0, "add_eos": False, "add_space_prefix": False} | changes
    return tokenizer_for(make_vocab("t5", tokens, **given))


def test_unigrams_scores_and_the_penalty_of_the_unknown():
    """An unknown character costs ten more than the worst normal piece."""
    pieces = [("a", NORMAL, -1.0), ("ab", NORMAL, -20.0), ("b", UNUSED, -99.0)]
    assert unigram(pieces).encode("ab") == [2]  # -20 rather than -1 and -99
    assert unigram(pieces[:2]).encode("ab") == [2]  # or -1 and -30
    cheap = [("a", NORMAL, -1.0), ("bc", NORMAL, -2.0), ("abc", NORMAL, -2.5)]
    assert unigram(cheap).encode("abc") == [3]
    assert unigram(cheap[:2]).encode("xabc") == [0, 1, 2]
    user = [("a", NORMAL, -1.0), ("aa", USER, -50.0)]
    t = unigram(user)
    assert t._encoder.encode("aa") == [2], "one that a user defined costs nothing"
    assert unigram([("a", CONTROL, 0.0)]).encode("a") == [0]
    assert unigram([("a", NORMAL, -1.0)], unk=None).encode("xa") == [1]
    assert unigram([("a", NORMAL, -1.0)], scores=None).encode("axxa") == [1, 0, 1]


@pytest.mark.parametrize(
    ("prefix", "merge", "text", "expected"),
    [
        (False, False, "a a", "a_a"), (True, False, "a a", "_a_a"), (True, False, " a", "__a"),
        (True, False, "  ", "__"), (False, False, " a ", "_a_"), (True, True, "  a   b ", "_a_b"),
        (False, True, "a b", "_a_b"), (True, True, "   ", ""), (True, False, "", ""),
    ],
)  # fmt: skip
def test_spaces_of_unigram(prefix, merge, text, expected):
    options = {"add_space_prefix": prefix, "normalizer": Normalizer(merge_spaces=merge)}
    encoder = unigram([("a", NORMAL, -1.0)], **options)._encoder
    assert encoder._normalized(text).replace("\u2581", "_") == expected


def test_scores_of_plamo_are_rounded_and_the_lowest_are_of_no_token():
    assert [plamo._rounded(s) for s in (1.0, -1.00004, -1.00005, 0.00005, -0.00004)] == [
        10_000, -10_000, -10_001, 1, 0
    ]  # fmt: skip
    assert [plamo._rounded(s) for s in (math.inf, -math.inf, math.nan, -2000.0)] == [None] * 4
    assert plamo._rounded(-1999.9999) == -19_999_999


def test_plamo_takes_the_best_cut_of_all():
    rng = random.Random(0)
    pieces = {"a": -1.0, "b": -1.5, "ab": -2.6, "ba": -2.4, "aba": -3.9, "bb": math.nan}
    tokens = [(text, NORMAL) for text in pieces]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    t = tokenizer_for(make_vocab("plamo2", tokens, scores=[*pieces.values(), *[0.0] * 256]))

    def best(text):
        if not text:
            return 0
        found = [
            score + best(text[len(piece) :])
            for piece, score in pieces.items()
            if text.startswith(piece) and score == score
        ]
        return max(found)

    for _ in range(60):
        text = "".join(rng.choices("ab", k=rng.randint(1, 8)))
        ids = t.encode(text)
        names = [tokens[i][0] for i in ids]
        assert "".join(names) == text
        assert sum(pieces[name] for name in names) == pytest.approx(best(text))
    assert t.encode("\u00e9") == [6 + 0xC3, 6 + 0xA9]
    assert t.encode("c") == [6 + ord("c")]


# --- SentencePiece's model ------------------------------------------------------------------------


def test_numbers_on_the_wire():
    assert [spm._varint(n) for n in (0, 1, 127, 128, 300, 16384)] == [
        b"\0", b"\1", b"\x7f", b"\x80\1", b"\xac\2", b"\x80\x80\1"
    ]  # fmt: skip
    assert spm._integer(3, 5) == b"\x18\5"
    assert spm._integer(35, 1) == b"\x98\2\1"
    assert spm._bytes(1, b"ab") == b"\x0a\2ab"
    piece = spm._piece(b"ab", b"\0\0\x80?", 1)
    assert piece == b"\x0a\x0b\x0a\x02ab\x15\0\0\x80?\x18\1"
    long = spm._piece(b"x" * 200, bytes(4), 6)
    assert long == b"\x0a\xd2\x01\x0a\xc8\x01" + b"x" * 200 + b"\x15" + bytes(4) + b"\x18\6"


def test_kinds_and_texts_of_pieces():
    kinds = [UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE, UNKNOWN]
    texts = ["a", "b", "<unk>", "<s>", "u", "v", "<0x0a>", "<unk2>"]
    vocab = make_vocab("llama", list(zip(texts, kinds, strict=True)))
    assert spm._kinds(vocab) == [NORMAL, NORMAL, UNKNOWN, CONTROL, NORMAL, NORMAL, BYTE, CONTROL]
    assert vocab.token_types.tolist() == kinds, "the vocabulary itself stays as it is"
    found = list(spm._texts(vocab))
    assert found[6] == (b"<0x0A>", BYTE)
    odd = [("a", NORMAL), ("a", NORMAL), ("", NORMAL), ("x\0", NORMAL), ("\udcff", NORMAL),
           ("<0x41>", NORMAL), ("plain", BYTE), ("<0xZZ>", NORMAL)]  # fmt: skip
    found = list(spm._texts(make_vocab("llama", odd)))
    assert [kind for _, kind in found] == [
        NORMAL, CONTROL, CONTROL, CONTROL, CONTROL, BYTE, NORMAL, NORMAL
    ]  # fmt: skip
    assert len({text for text, _ in found}) == len(odd)
    assert found[1][0] == "\ue000unreachable 1\ue000".encode()
    assert [byte_of_token(t) for t in ("<0x0A>", "<0xff>", "<0x0A", "x<0x0A>", "<0x0G>")] == [
        10, 255, None, None, None
    ]  # fmt: skip


def test_pieces_that_only_the_library_has_become_the_unknown_one():
    tokens = [("<unk>", UNKNOWN), ("a", NORMAL)]
    t = tokenizer_for(make_vocab("llama", tokens, scores=[0.0, -1.0], unk=0,
                                 add_space_prefix=False, add_bos=False))  # fmt: skip
    assert t.encode("a\u00e9a") == [1, 0, 0, 1]
    none = tokenizer_for(make_vocab("llama", tokens, scores=[0.0, -1.0], add_space_prefix=False))
    assert none.encode("a\u00e9a") == [1, 1]
    scored = [("<unk>", UNKNOWN), *((text, NORMAL) for text in ("a", "b", "c", "ab", "bc"))]
    for scores, ids in (([-1.0, -2.0], [4, 3]), ([-2.0, -1.0], [1, 5])):
        t = tokenizer_for(make_vocab("llama", scored, scores=[0.0, -9.0, -9.0, -9.0, *scores],
                                     unk=0, add_space_prefix=False))  # fmt: skip
        assert t.encode("abc") == ids


# --- words of BERT --------------------------------------------------------------------------------


def words(text, **options):
    encoder = SimpleNamespace(_normalizer=Normalizer(**options))
    return list(wordpiece.WordPieceEncoder._words(encoder, text))


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("Ab, c", {}, ["ab", ",", "c"]), ("Ab", {"lowercase": False, "strip_accents": False},
                                          ["Ab"]),
        ("\u00c9a", {}, ["ea"]), ("\u00c9a", {"strip_accents": False}, ["\u00e9a"]),
        ("\u00c9a", {"lowercase": False}, ["Ea"]), ("a\u4e00b", {}, ["a", "\u4e00", "b"]),
        ("a+b", {}, ["a", "+", "b"]), ("a\u00d7b", {}, ["a\u00d7b"]), ("a~b", {}, ["a", "~", "b"]),
        ("a\u00adb\0c\ufffd", {}, ["abc"]), ("a\u3000b\u200ac", {}, ["a", "b", "c"]), ("", {}, []),
        ("\u0301", {}, []), ("!!", {}, ["!", "!"]),
    ],
)  # fmt: skip
def test_words_of_bert(text, options, expected):
    assert words(text, **options) == expected


def test_a_cache_of_berts_words_is_emptied_when_it_is_full(monkeypatch):
    monkeypatch.setattr(wordpiece, "_CACHE_WORDS", 2)
    t = tokenizer_for(make_vocab("bert", [("\u2581a", NORMAL), ("\u2581b", NORMAL)], add_bos=False))
    encoder, sizes = t._encoder, []
    for word in ("a", "a", "b", "ab"):
        encoder.encode(word)
        sizes.append(len(encoder._cache))
    assert sizes == [1, 1, 2, 1]
    assert encoder.encode("a b a") == [0, 1, 0]


# --- runs and threes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "isolated", "expected"),
    [
        ("x1y", True, ["x", "1", "y"]), ("x1234y", True, ["x", "1", "234", "y"]),
        ("123456", True, ["123", "456"]), ("12345", True, ["12", "345"]),
        ("x1234y", False, ["x1", "234y"]), ("123x", False, ["123x"]), ("12", False, ["12"]),
        ("123456", False, ["123", "456"]),
    ],
)  # fmt: skip
def test_digits_are_counted_from_their_end(text, isolated, expected):
    import regex

    rule = pretokenize._Threes(r"\d+", isolated)
    assert pretokenize._split([text], regex.compile(rule.pattern), rule) == expected


def test_long_runs_of_marks_are_normalized_in_parts():
    n = pretokenize._MOST_MARKS
    text = "e" + "\u0301" * n
    assert pretokenize.normalized("NFC", text) == "\u00e9" + "\u0301" * (n - 1)
    late = "e" + "\u0316" * n + "\u0301"
    assert pretokenize.normalized("NFC", late) == late, "the last one is in a part of its own"
    short = "e" + "\u0316" * (n - 2) + "\u0301"
    assert pretokenize.normalized("NFC", short)[0] == "\u00e9"
    assert pretokenize.normalized("NFD", "plain") == "plain"
    assert pretokenize.words_between_spaces(" a\u00a0b\u3000 c\n") == ["a", "b", "c"]
    assert pretokenize.known() == sorted(pretokenize.known())
    assert [pretokenize.is_known(name) for name in ("gpt-2", "none")] == [True, False]


# --- a query and a document -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("bert", {}, "0 q 1 2 d 1"), ("bert", {"eos": None}, "0 q 2 2 d 2"), ("t5", {}, "q 1 d 1"),
        ("bert", {"add_sep": False}, "0 q 1 d 1"), ("gpt2", {}, "q d"), ("gpt2", {"add_eos": True},
                                                                        "q 1 d 1"),
        ("gpt2", {"pre": "roberta-bpe"}, "q 2 d"), ("gpt2", {"add_sep": True}, "q 2 d"),
        ("t5", {"add_eos": False}, "q d"), ("gpt2", {"sep": None, "add_sep": True}, "q d"),
        ("bert", {"add_eos": False}, "0 q 2 d"), ("gpt2", {"add_bos": True}, "0 q d"),
    ],
)  # fmt: skip
def test_a_pair_is_joined_as_its_vocabulary_says(model, given, expected):
    if model == "bert":
        given = {"add_eos": True} | given
    ids = {"bos": 0, "eos": 1, "sep": 2} | given
    vocab = make_vocab(model, [(str(i), CONTROL) for i in range(4)], **ids)
    has_bos = model == "bert" or given.get("add_bos") or vocab.pre in pretokenize.ADDS_BOS
    fake = SimpleNamespace(
        bos=0, add_bos=has_bos, encode=lambda text, add_special: [text] if not add_special else []
    )
    found = pair.encode_pair(vocab, fake, "q", "d")
    assert " ".join(map(str, found)) == expected


def test_a_pair_is_written_into_its_files_own_template():
    vocab = make_vocab("gpt2", BYTES, rank_template="<q>{query}|{document}{query}</s>")
    parts = []
    fake = SimpleNamespace(encode_parts=lambda given: parts.extend(given) or [5])
    assert pair.encode_pair(vocab, fake, "{document}", "d") == [5]
    assert [part for part in parts if part[0]] == [
        ("<q>", True), ("{document}", False), ("|", True), ("d", False), ("{document}", False),
        ("</s>", True),
    ]  # fmt: skip


# --- text as it comes -----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abé", max_size=10),
    stop=st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
    places=st.lists(st.integers(0, 20), max_size=6),
)
def test_text_stops_before_what_is_complete_first(text, stop, places):
    ends = [(text.index(each) + len(each), text.index(each)) for each in stop if each in text]
    _, at = min(ends, default=(len(text), len(text)))
    data = text.encode()
    stream, out = detokenize.TextStream(stop), ""
    for start, end in itertools.pairwise(
        [0, *sorted(min(p, len(data)) for p in places), len(data)]
    ):
        out += stream.push(data[start:end])
        assert text.startswith(out), "nothing that may be taken back"
    assert out + stream.finish() == text[:at]
    assert (stream.stopped is not None) is bool(ends)
    assert stream.push(b"more") == stream.finish() == "" or not ends


def test_what_may_begin_a_stop_string_is_held_back_and_no_more():
    stream = detokenize.TextStream(["</a>", "abc"])
    assert [stream.push(piece) for piece in (b"x<", b"/", b"y", b"ab", b"d</a", b"\xc3")] == [
        "x", "", "</y", "", "abd", ""
    ]  # fmt: skip
    assert stream.finish() == "</a\ufffd"
    assert detokenize.TextStream(["a", "ab"]).push(b"ab") == ""
    longest = detokenize.TextStream(["b", "ab"])
    assert longest.push(b"xab") == "x"
    assert longest.stopped == "ab"
    for wrong in ("stop", [""]):
        with pytest.raises((TypeError, ValueError), match=r"sequence of strings|empty stop string"):
            detokenize.TextStream(wrong)
