"""How texts are normalized, and each family of BPE vocabularies cuts them into words.

The patterns are those that the models were trained with; llama.cpp, whose regular expressions know
no letter case beyond ASCII, cuts words of GPT-4o's and Tekken's families elsewhere there.

Every step takes time in proportion to the text, whatever it is: no pattern may look through a run
of characters at more than a few of its places.
"""

import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import regex

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    """Llama 3's pattern; a word has as many digits as ``digits`` matches."""
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, suffix: str) -> str:
    """The pattern of GPT-4o and Tekken, which cuts words at a change from lower to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = (_llama3(r"\p{N}{1,3}"),)
_QWEN2 = (_llama3(r"\p{N}"),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_PUNCTUATED = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_KANA_HAN = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA_HAN, _PUNCTUATED)


class _Threes(NamedTuple):
    """Digits, in groups of three counted from their end.

    Each group is a piece; the text around the digits is separate if ``isolated``, otherwise the
    following text stays with the last group.
    """

    pattern: str
    isolated: bool = True


# `\b` is written out where it is needed: what counts as a word differs between libraries.
_WORD_END = r"(?![\p{L}\p{M}\p{N}\p{Pc}])"
_GPT4O = (_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)
# Llama 3's, but no word of letters has a character of Chinese and none ends with slashes.
_KIMI = _GPT4O[0].replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]")
_SEED_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
# Long runs of spaces are cut into powers of two. Only one search for a line's end is needed: within
# spaces there is none ahead, or the match before would have reached it.
_JAIS2_LINES = r"|(?<![^\S\r\n])\s*[\r\n]+|"
_JAIS2_SPACES = "|".join(rf"\s{{{2**k}}}(?!\S)" for k in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
# Cased letters that DeepSeek LLM's pattern lists; of Armenian, for one, only the capitals.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_LINES = r"[^\n]+|\n+"
# Scripts that are written without spaces, as the models list them.
_YOUTU_CJK = (
    "[가-힣\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANA_HAN
)
_AFMOE_CJK = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Patterns are applied in order to the pieces of the ones before; each match and each gap is a
# piece.
_FAMILIES: dict[tuple[str, ...], tuple[str | _Threes, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"): (_GPT2,),
    ("mpt", "olmo", "jais", "trillion", "granite-docling", "modern-bert"): (_GPT2,),
    ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"): (_GPT2,),
    ("roberta-bpe",): (_GPT2,),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"): _LLAMA3,
    ("midm-2.0", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5", "jina-v5-nano"): _LLAMA3,
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"): _QWEN2,
    ("f2llmv2", "solar-open", "grok-2"): _QWEN2,
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"): _DIGITS_GPT2,
    ("minerva-7b", "mellum2"): _DIGITS_GPT2,
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    ("deepseek-llm",): (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"(?<!\s)\s++$",
        _CJK,
        r"\p{N}+",
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("tekken",): (_cased(r"\p{N}", ""),),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _GPT4O,
    ("granite-embed-multi-97m",): _GPT4O,
    ("tiny_aya", "cohere2moe"): (_Threes(rf"(?<!\d)\d++{_WORD_END}"), *_GPT4O),
    ("youtu",): (_YOUTU_CJK, _cased(r"\p{N}", _CONTRACTIONS + "?")),
    ("kimi-k2",): (rf"(?V1)\p{{Han}}+|{_KIMI}",),
    ("qwen35",): (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    ("ufakzeka",): (_QWEN2[0].removeprefix(_CONTRACTIONS + "|"),),
    ("minicpm5",): (r"\p{N}{1,3}", _llama3(r"\p{N}+")),
    ("jais-2",): (_LLAMA3[0].removesuffix(f"|{_SPACES}") + _JAIS2_LINES + _JAIS2_SPACES,),
    ("seed-coder",): (f"{_CONTRACTIONS}|{_SEED_WORDS}|{_SPACES}",),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        _QWEN2[0].replace(r"|\s*[\r\n]+|", r"|\s*[\r\n]|"),
    ),
    ("superbpe",): (r"\p{N}+", _Threes(r"\d+", isolated=False)),
    ("afmoe",): (_Threes(r"\p{N}+"), _AFMOE_CJK, _PUNCTUATED),
    ("spark2_5",): (
        r"\p{N}{1,3}",
        _KANA_HAN,
        _PUNCTUATED.removesuffix(f"[\\r\\n]*|{_SPACES}") + r"|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    ("laguna",): (_LINES, *_QWEN2),
    ("exaone-moe",): (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("chameleon",): (
        r"<sentinel:[0-9]+>",
        r"IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    ("gemma4", "granite-embed-multi-311m", "sarvam-moe"): (_LINES,),
    ("whitespace",): (r"\S+",),
    ("poro-chat", "bloom", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
}
_PATTERNS = {name: patterns for names, patterns in _FAMILIES.items() for name in names}

# These start with BOS if the file does not say.
_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0 jina-v5-nano"
ADDS_BOS = frozenset([*_LLAMA3_NAMES.split(), "tekken", "chameleon"])
# These do so whatever the file says, as llama.cpp.
ALWAYS_ADDS_BOS = frozenset(["gemma4", "granite-embed-multi-311m"])

# A word that is a token as a whole becomes that token, regardless of the merges.
IGNORES_MERGES = frozenset(
    [*_LLAMA3_NAMES.split(), "tekken", "minicpm5", "glm4", "glm5", "youtu"]
) | {"granite-embed-multi-97m"}
# Texts are composed (NFC) before they are cut, as these models' own tokenizers do it, which
# llama.cpp's does not: Qwen's, Cohere's and GPT-NeoX's, which MPT, OLMo and ModernBERT took over.
COMPOSED = frozenset(
    ["qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "command-r", "mpt", "olmo", "modern-bert"]
)
# The same holds here, but only for words of line ends.
WHOLE_LINE_ENDS = ALWAYS_ADDS_BOS
# Tokens consist of characters, not of letters of GPT-2's byte alphabet.
OF_CHARACTERS = frozenset(["gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"])

# Unicode's White_Space.
WHITE_SPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
_BETWEEN_SPACES = regex.compile(f"[^{''.join(WHITE_SPACE)}]+")


# Sorting the marks after a letter takes time that grows with the square of their number: 40,000
# take 5 s. Text has few (Unicode's stream-safe format allows 30); longer runs are normalized in
# parts.
_MOST_MARKS = 256
_LONG_RUN = regex.compile(rf"\P{{ccc=0}}{{{_MOST_MARKS}}}")


def normalized(form: Literal["NFC", "NFD"], text: str) -> str:
    """Return ``text`` in a normal form; runs of more than 256 marks are normalized in parts."""
    if text.isascii():
        return text
    cuts = [match.end() for match in _LONG_RUN.finditer(text)]
    if not cuts:
        return unicodedata.normalize(form, text)
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return "".join(unicodedata.normalize(form, part) for part in parts)


def known() -> list[str]:
    """Return the names of the known pre-tokenizers."""
    return sorted(_PATTERNS)


def is_known(pre: str) -> bool:
    """Whether there is a rule for the pre-tokenizer ``pre``."""
    return pre in _PATTERNS


def words_between_spaces(text: str) -> list[str]:
    """The stretches of ``text`` without white space."""
    return _BETWEEN_SPACES.findall(text)


def split_words(text: str, pre: str) -> list[str]:
    """Cut ``text`` into the words of the pre-tokenizer ``pre``; joined, they are the text."""
    words = [text] if text else []
    for pattern, threes in _compiled(pre):
        words = _split(words, pattern, threes)
    return words


_Step = tuple["regex.Pattern[str]", _Threes | None]


@cache
def _compiled(pre: str) -> tuple[_Step, ...]:
    return tuple(
        (regex.compile(step.pattern), step)
        if isinstance(step, _Threes)
        else (regex.compile(step), None)
        for step in _PATTERNS[pre]
    )


def _split(words: list[str], pattern: "regex.Pattern[str]", threes: _Threes | None) -> list[str]:
    """Cut each word at the start and the end of each match of the pattern."""
    out: list[str] = []
    for word in words:
        end = 0
        for match in pattern.finditer(word):
            start, stop = match.span()
            for cut in (start, stop) if threes is None else _threes(start, stop, threes):
                if cut > end:
                    out.append(word[end:cut])
                    end = cut
        if end < len(word):
            out.append(word[end:])
    return out


def _threes(start: int, stop: int, threes: _Threes) -> Iterator[int]:
    """Yield the positions at which a match is cut."""
    if threes.isolated:
        yield start
    yield from range(start + (stop - start) % 3, stop, 3)
    if threes.isolated:
        yield stop
