"""Words of each pre-tokenizer against Hugging Face's `tokenizers`, given the published patterns.

The patterns are those of the models' tokenizer.json files as llama.cpp's src/llama-vocab.cpp quotes
or lists them, in its order; a pattern here is written out, those of the package are put together.
"""

import itertools
import time
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tamis.text import pretokenize

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_UP, _LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_HAN = r"\p{M}&&[^\p{Han}]]"
_KIMI_UP, _KIMI_LOW = _UP.replace(r"\p{M}]", _NO_HAN), _LOW.replace(r"\p{M}]", _NO_HAN)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# The letters that DeepSeek LLM's tokenizer.json lists: those with case, as of some Unicode version.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
PUBLISHED: dict[str, list[str]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling "
    "modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe": [
        _GPT2
    ],
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0 dbrx smaug-bpe chatglm-bpe "
    "glm4 glm5 jina-v5-nano": [_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")],
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2 solar-open grok-2": [_QWEN2],
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": [r"\p{N}", _GPT2],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-llm": [
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ],
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        _ASCII_PUNCTUATION
        + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "tekken": [_GPT4O.replace(_CONTRACTIONS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")],
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": [_GPT4O],
    "tiny_aya cohere2moe": [r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O],
    "kimi-k2": [
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UP}*{_KIMI_LOW}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UP}+{_KIMI_LOW}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "ufakzeka": [
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "minicpm5": [r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")],
    "jais-2": [
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
        r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "seed-coder": [
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "bailingmoe bailingmoe2 llada-moe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "afmoe": [
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _ASCII_PUNCTUATION
        + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "spark2_5": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        _ASCII_PUNCTUATION
        + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
        r"|\s+(?!\S)|\s+",
        r"\p{N}",
    ],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ],
    "laguna": [r"[^\n]+|[\n]+", _QWEN2],
    "exaone-moe": [
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "chameleon": [
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ],
    "gemma4 granite-embed-multi-311m sarvam-moe": [r"[^\n]+|[\n]+"],
    "whitespace": [r"\S+"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "poro-chat bloom gpt3-finnish": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
}


def oracle(patterns: list[str]) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    )


ORACLES = {names.split()[0]: oracle(patterns) for names, patterns in PUBLISHED.items()}
# Old characters only: libraries differ in which version of Unicode they know.
CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(
    lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn"
)
WORDS = (
    "a b Z É é ß ǅ ʰ ª 𝐀 我 龥 の カ ー 한 ก ा \u0301 0 1 23 4567 ٣ ½ Ⅷ 's 'S 'll 'VE ' \" . , ! ? "
    "… 。 ， । - _ / \\ ( ) [ { | } ~ ` ^ $ + < = > @ # % & * : ; € © 😀 \u200d \ue000"
)
SPACES = [*(" " * n for n in (1, 2, 4)), *"\t\n\r\xa0\u3000\x85\u2028\x1c\0", "\r\n"]
PIECES = st.sampled_from([*WORDS.split(" "), *SPACES])
TEXTS = st.lists(PIECES | CHARACTERS, max_size=16).map("".join)


@settings(max_examples=2000, deadline=None)
@given(TEXTS)
def test_words_are_those_of_the_published_patterns(text):
    for name, expected in ORACLES.items():
        words = [word for word, _ in expected.pre_tokenize_str(text)]
        assert pretokenize.split_words(text, name) == words, name


def test_every_name_has_a_published_pattern_and_names_of_one_pattern_cut_alike():
    families = [names.split() for names in PUBLISHED]
    assert sorted(itertools.chain(*families)) == pretokenize.known()
    for first, *others in families:
        for other in others:
            assert pretokenize._PATTERNS[other] == pretokenize._PATTERNS[first]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 9, 100, 600])
def test_runs_of_spaces(n):
    for name, expected in ORACLES.items():
        text = f"a{' ' * n}b{' ' * n}"
        words = [word for word, _ in expected.pre_tokenize_str(text)]
        assert pretokenize.split_words(text, name) == words, name


HOSTILE = {
    "spaces": " ",
    "line ends": "\n",
    "spaces and line ends": "    \n",
    "capitals": "A",
    "capitals and ideographs": "AAAA中",
    "digits": "7",
    "punctuation": "!?",
    "ideographs": "我",
    "combining marks": "\u0301",
    "controls": "\x01\ue000",
    "mixed": "aZ中 7\u0301!\n  ",
}


def seconds(text: str, name: str) -> float:
    start = time.process_time()
    pretokenize.split_words(text, name)
    return time.process_time() - start


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("ending", ["", "x"])
def test_a_hundred_times_the_text_takes_about_a_hundred_times_as_long(kind, ending):
    for name in ORACLES:
        few, some, many = ((HOSTILE[kind] * n)[:n] + ending for n in (600, 6_000, 60_000))
        seconds(few, name)  # compiles the patterns
        base = max(min(seconds(few, name) for _ in range(3)), 2e-4)
        # Of a quadratic step ten times the text would take a hundred times as long.
        assert seconds(some, name) < 40 * base, name
        assert seconds(many, name) < 400 * base, name
