"""How each family of BPE vocabularies cuts text into words before merging."""

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
_GPT4O = (_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)
# Llama 3's, but no word of letters has a character of Chinese and none ends with slashes.
_KIMI = _GPT4O[0].replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]")
_SEED_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
# Long spaces are cut into powers of two.
_JAIS2_SPACES = "|".join(rf"\s{{{2**k}}}(?!\S)" for k in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# One pattern after the other cuts what the ones before it left, each match and each gap a piece.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"): (_GPT2,),
    ("a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "exaone4", "jina-v1-en"): (_GPT2,),
    ("mpt", "olmo", "jais", "trillion", "granite-docling", "jina-v2-code"): (_GPT2,),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"): _LLAMA3,
    ("midm-2.0", "jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): _LLAMA3,
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"): _QWEN2,
    ("f2llmv2", "solar-open", "grok-2"): _QWEN2,
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"): _DIGITS_GPT2,
    ("minerva-7b", "mellum2"): _DIGITS_GPT2,
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    ("deepseek-llm",): (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("tekken",): (_cased(r"\p{N}", ""),),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _GPT4O,
    ("tiny_aya", "cohere2moe"): (r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O),
    ("kimi-k2",): (rf"(?V1)\p{{Han}}+|{_KIMI}",),
    ("qwen35",): (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    ("ufakzeka",): (_QWEN2[0].removeprefix(_CONTRACTIONS + "|"),),
    ("laguna",): (r"[^\n]+|\n+", *_QWEN2),
    ("minicpm5",): (r"\p{N}{1,3}", _llama3(r"\p{N}+")),
    ("jais-2",): (_LLAMA3[0].removesuffix(r"\s+(?!\S)|\s+") + _JAIS2_SPACES,),
    ("seed-coder",): (f"{_CONTRACTIONS}|{_SEED_WORDS}|{_SPACES}",),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("superbpe",): (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    ("poro-chat", "bloom", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
}
_PATTERNS = {name: patterns for names, patterns in _FAMILIES.items() for name in names}

# These start with BOS if the file does not say.
_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0 jina-v5-nano"
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
