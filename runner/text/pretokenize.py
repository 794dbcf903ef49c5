"""How each family of BPE vocabularies cuts text into words before merging.

The patterns are those that the models were trained with; llama.cpp, whose regular expressions know
no letter case beyond ASCII, cuts words of GPT-4o's and Tekken's families elsewhere there. Left out
are names of encoders (jina-*, roberta-bpe, ...): their tokens need more than a pattern.
"""

from functools import cache

import regex

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    """The pattern of Llama 3, with up to as many digits in one word as ``digits`` matches."""
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, suffix: str) -> str:
    """The pattern of GPT-4o and Tekken, which cuts words where lower case turns to upper."""
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
# `\b` is written out where it is needed: what counts as a word differs between libraries.
_WORD_END = r"(?![\p{L}\p{M}\p{N}\p{Pc}])"
_GPT4O = (_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)
# Llama 3's, but no word of letters has a character of Chinese and none ends with slashes.
_KIMI = _GPT4O[0].replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]")
_SEED_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
# Long spaces are cut into powers of two.
_JAIS2_SPACES = "|".join(rf"\s{{{2**k}}}(?!\S)" for k in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
# The letters with case that DeepSeek LLM's own pattern lists: Armenian only in capitals, say.
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
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# One pattern after the other cuts what the ones before it left, each match and each gap a piece.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"): (_GPT2,),
    ("mpt", "olmo", "jais", "trillion", "granite-docling"): (_GPT2,),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"): _LLAMA3,
    ("midm-2.0", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): _LLAMA3,
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
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("tekken",): (_cased(r"\p{N}", ""),),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _GPT4O,
    ("tiny_aya", "cohere2moe"): (rf"\d{{1,3}}(?=(?:\d{{3}})*{_WORD_END})", *_GPT4O),
    ("kimi-k2",): (rf"(?V1)\p{{Han}}+|{_KIMI}",),
    ("qwen35",): (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    ("ufakzeka",): (_QWEN2[0].removeprefix(_CONTRACTIONS + "|"),),
    ("minicpm5",): (r"\p{N}{1,3}", _llama3(r"\p{N}+")),
    ("jais-2",): (_LLAMA3[0].removesuffix(r"\s+(?!\S)|\s+") + _JAIS2_SPACES,),
    ("seed-coder",): (f"{_CONTRACTIONS}|{_SEED_WORDS}|{_SPACES}",),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        _QWEN2[0].replace(r"|\s*[\r\n]+|", r"|\s*[\r\n]|"),
    ),
    ("superbpe",): (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    ("poro-chat", "bloom", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
}
_PATTERNS = {name: patterns for names, patterns in _FAMILIES.items() for name in names}

# These start with BOS if the file does not say.
_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0"
ADDS_BOS = frozenset([*_LLAMA3_NAMES.split(), "tekken"])

# A word that is a token as a whole is that token, whatever the merges would make of it.
IGNORES_MERGES = ADDS_BOS | {"minicpm5"}


@cache
def _compiled(pre: str) -> tuple["regex.Pattern[str]", ...]:
    return tuple(regex.compile(pattern) for pattern in _PATTERNS[pre])


def known() -> list[str]:
    """Return the names of the pre-tokenizers there are rules for."""
    return sorted(_PATTERNS)


def is_known(pre: str) -> bool:
    """Whether there is a rule for the pre-tokenizer ``pre``."""
    return pre in _PATTERNS


def split_words(text: str, pre: str) -> list[str]:
    """Cut ``text`` into the words of the pre-tokenizer ``pre``; joined, they are the text."""
    words = [text] if text else []
    for pattern in _compiled(pre):
        words = _split(words, pattern)
    return words


def _split(words: list[str], pattern: "regex.Pattern[str]") -> list[str]:
    out: list[str] = []
    for word in words:
        end = 0
        for match in pattern.finditer(word):
            start, stop = match.span()
            if start > end:
                out.append(word[end:start])
            if stop > start:
                out.append(word[start:stop])
            end = stop
        if end < len(word):
            out.append(word[end:])
    return out
