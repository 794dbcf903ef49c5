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
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# One pattern after the other cuts what the ones before it left, each match and each gap a piece.
_FAMILIES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"): (_GPT2,),
    ("a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "exaone4"): (_GPT2,),
    ("mpt", "olmo", "jais", "trillion"): (_GPT2,),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"): _LLAMA3,
    ("midm-2.0", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): _LLAMA3,
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"): _QWEN2,
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"): _DIGITS_GPT2,
    ("minerva-7b",): _DIGITS_GPT2,
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
    ("deepseek-v3",): (
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    ("tekken",): (_cased(r"\p{N}", ""),),
    ("gpt-4o", "llama4"): (_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),),
    ("poro-chat", "bloom", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
}
_PATTERNS = {name: patterns for names, patterns in _FAMILIES.items() for name in names}

# A word that is a token as a whole is that token, whatever the merges would make of it.
IGNORES_MERGES = frozenset(
    [
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "lfm2",
        "midm-2.0",
        "tekken",
    ]
)

# These start with BOS if the file does not say.
ADDS_BOS = IGNORES_MERGES


@cache
def _compiled(pre: str) -> tuple["regex.Pattern[str]", ...]:
    return tuple(regex.compile(pattern) for pattern in _PATTERNS[pre])


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
