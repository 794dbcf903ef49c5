"""The validated vocabulary of a GGUF file, from which tokenizers are built."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from tamis.formats.strings import Strings

if TYPE_CHECKING:
    from tamis.formats.gguf import GGUFFile

# Texts by which llama.cpp recognises tokens for which files have no key; the first one in the
# vocabulary is used.
_EOT_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_EOM_TEXTS = ("<|eom_id|>",)
_FIM_TEXTS = {
    "pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
# Every token with one of these texts ends the generation.
_EOG_TEXTS = frozenset(_EOT_TEXTS) | {
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[EOS]",
    "[e~[",
}
# In gpt-oss these mark parts of the answer, whatever their type in the file: text, not control
# tokens.
_MARKUP_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Llama's end of sequence; in vocabularies of other families it is an ordinary HTML tag.
_SPM_EOS = "</s>"
_KNOWN_TEXTS = frozenset(_EOG_TEXTS).union(_MARKUP_TEXTS, (_SPM_EOS,), *_FIM_TEXTS.values())

# the last key is spelt this way in files
_KEY_NAMES = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
_NO_TOKEN = (-1, 0xFFFFFFFF)  # converters write -1, signed or not, for "none"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


# The values of `tokenizer.ggml.model`, with their meanings.
MODELS = {
    "llama": "SPM",
    "gpt2": "byte-level BPE",
    "gemma4": "BPE of characters",
    "whitespace": "BPE of characters between spaces",
    "hybriddna": "byte-level BPE with k-mers of DNA",
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "longest match",
    "plamo2": "PLaMo-2",
}
_WITH_MERGES = ("gpt2", "gemma4", "whitespace", "hybriddna")
# Special tokens of vocabularies whose files lack them.
_DEFAULT_IDS = {
    "bert": {"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
# Vocabularies in which `<mask>`, or `[MASK]`, absorbs the spaces before it.
_MASK_STRIPS_PRE = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_MASK_STRIPS_ARCH = ("nomic-bert-moe", "jina-bert-v3")


class TokenType(IntEnum):
    """The kind of a token, with the numbers of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def byte_of_token(text: str) -> int | None:
    """Return the byte that a token text such as ``<0x0A>`` stands for; None for any other."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


@dataclass(frozen=True)
class Normalizer:
    """Changes to a text before it is split into tokens.

    ``charsmap`` is SentencePiece's precompiled map of characters, as the file has it.
    """

    lowercase: bool = True
    strip_accents: bool = True
    merge_spaces: bool = False
    charsmap: bytes = b""


@dataclass(frozen=True, eq=False)
class Vocab:
    """A validated vocabulary; token ids are the indices of ``tokens``.

    ``model`` is one of MODELS; ``pre`` names the BPE pre-tokenizer ("default" if the file does
    not). Bytes of a token that are not UTF-8 are surrogate escapes. ``merges`` are in order of
    rank, two parts with a space between. ``token_types`` are TokenType numbers, with llama.cpp's
    corrections: tokens known by their text to be control tokens are of that type.

    ``normalizer`` is for WordPiece, Unigram and "whitespace" only. Of tokens that are matched
    literally in text, those in ``lstrip`` absorb the white space before them, those in ``rstrip``
    that after them.

    Special ids are None if there is none; all others are in range. ``eot``, ``eom`` and ``fim``
    (those of pre, suf, mid, pad, rep and sep that exist) are found by their text if no key names
    them. ``eog`` are all tokens that end the generation. ``add_bos``, ``add_eos`` and ``add_sep``
    are None if the file leaves them to the tokenizer. ``rank_template`` is the template of a query
    and a document.
    """

    model: str
    pre: str
    tokens: Strings
    token_types: np.ndarray  # int32 [n_vocab]
    scores: np.ndarray | None  # float32 [n_vocab]
    merges: Strings
    bos: int | None
    eos: int | None
    eot: int | None
    eom: int | None
    unk: int | None
    pad: int | None
    sep: int | None
    fim: Mapping[str, int]
    eog: frozenset[int]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool
    chat_template: str | None
    mask: int | None = None
    normalizer: Normalizer = field(default_factory=Normalizer)
    lstrip: frozenset[int] = frozenset()
    rstrip: frozenset[int] = frozenset()
    add_sep: bool | None = None
    rank_template: str | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_gguf(cls, f: "GGUFFile") -> "Vocab":
        """Read the vocabulary; GGUFError naming the key for anything missing or inconsistent.

        The engine checks that its size is that of the embedding.
        """
        model = f.get("tokenizer.ggml.model", str)
        if model not in MODELS:
            known = ", ".join(f"{name!r} ({what})" for name, what in MODELS.items())
            raise f.error(
                f"tokenizer model {model!r} is not supported, only {known} are",
                key="tokenizer.ggml.model",
            )
        tokens = f.get("tokenizer.ggml.tokens", Strings)
        if not tokens:
            raise f.error("the vocabulary is empty", key="tokenizer.ggml.tokens")
        by_text = tokens.places(_KNOWN_TEXTS)
        ids = _special_ids(f, model, by_text, n_vocab=len(tokens))
        fim = _fim_ids(f, by_text, n_vocab=len(tokens))
        types = _token_types(f, n_vocab=len(tokens))
        eog = _eog_ids(by_text, types, ids, fim)
        _correct_types(types, by_text, fim)
        lstrip, rstrip = _stripping(f, tokens, types)
        return cls(
            model=model,
            pre=_pre(f, model),
            tokens=tokens,
            token_types=types,
            scores=_scores(f, n_vocab=len(tokens)),
            merges=_merges(f, model),
            fim=fim,
            eog=eog,
            add_bos=f.get("tokenizer.ggml.add_bos_token", bool, None),
            add_eos=f.get("tokenizer.ggml.add_eos_token", bool, None),
            add_space_prefix=f.get("tokenizer.ggml.add_space_prefix", bool, model == "llama"),
            chat_template=f.get("tokenizer.chat_template", str, None),
            add_sep=f.get("tokenizer.ggml.add_sep_token", bool, None),
            rank_template=f.get("tokenizer.chat_template.rerank", str, None),
            normalizer=_normalizer(f, model),
            lstrip=lstrip,
            rstrip=rstrip,
            **ids,
        )


def _pre(f: "GGUFFile", model: str) -> str:
    own = f.get("tokenizer.ggml.pre", str, "default")
    return model if model in ("gemma4", "whitespace") else own


def _merges(f: "GGUFFile", model: str) -> Strings:
    return f.get("tokenizer.ggml.merges", Strings) if model in _WITH_MERGES else Strings.of([])


def _normalizer(f: "GGUFFile", model: str) -> Normalizer:
    prefix = "tokenizer.ggml.normalizer"
    lowercase = f.get(f"{prefix}.lowercase", bool, model != "whitespace")
    key = "tokenizer.ggml.precompiled_charsmap"
    charsmap = f.get(key, np.ndarray, None)
    if charsmap is not None and charsmap.dtype not in (np.int8, np.uint8):
        raise f.error(f"expected an array of bytes, got {charsmap.dtype}", key=key)
    return Normalizer(
        lowercase=lowercase,
        strip_accents=f.get(f"{prefix}.strip_accents", bool, lowercase),
        merge_spaces=f.get("tokenizer.ggml.remove_extra_whitespaces", bool, False),
        charsmap=b"" if charsmap is None else charsmap.tobytes(),
    )


def _stripping(
    f: "GGUFFile", tokens: Strings, types: np.ndarray
) -> tuple[frozenset[int], frozenset[int]]:
    """Tokens that absorb white space before them, and after them; by names, as in llama.cpp."""
    pre = f.get("tokenizer.ggml.pre", str, "default")
    arch = f.get("general.architecture", str, "")
    name = f.get("general.name", str, "").lower()
    none: frozenset[int] = frozenset()
    mask = any(p in pre for p in _MASK_STRIPS_PRE) or any(a in arch for a in _MASK_STRIPS_ARCH)
    if mask:
        return frozenset(tokens.places(["<mask>"]).values()), none
    if "phi-3" in name or "phi3" in name:
        read = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        ids = set(np.flatnonzero(np.isin(types, read)).tolist())
        ids |= set(tokens.places([_SPM_EOS]).values())
        ids -= set(tokens.places(["<unk>", "<s>", "<|endoftext|>"]).values())
        return none, frozenset(ids)
    if "modern-bert" in name:
        return frozenset(tokens.places(["[MASK]"]).values()), none
    return none, none


def _special_id(f: "GGUFFile", name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = f.get(key, int, None)
    if token_id is None or token_id in _NO_TOKEN:
        return None
    if not 0 <= token_id < n_vocab:
        # For a token that a text never has, such as padding, an id out of range is ignored.
        what = f"{f.path}: {key} is {token_id}, outside the vocabulary of {n_vocab}"
        warnings.warn(f"{what}: there is no such token", stacklevel=2)
        return None
    return token_id


def _first(by_text: Mapping[str, int], texts: tuple[str, ...]) -> int | None:
    return next((by_text[text] for text in texts if text in by_text), None)


def _special_ids(
    f: "GGUFFile", model: str, by_text: Mapping[str, int], *, n_vocab: int
) -> dict[str, int | None]:
    ids = {
        name: _special_id(f, _KEY_NAMES.get(name, name), n_vocab)
        for name in ("bos", "eos", "eot", "eom", "unk", "pad", "sep", "mask")
    }
    for name, token_id in _DEFAULT_IDS.get(model, {}).items():
        key = f"tokenizer.ggml.{_KEY_NAMES.get(name, name)}_token_id"
        given = f.get(key, int, None)
        known = given is not None and (0 <= given < n_vocab or given in _NO_TOKEN)
        if not known and token_id < n_vocab:
            ids[name] = token_id
    if ids["eot"] is None:
        ids["eot"] = _first(by_text, _EOT_TEXTS)
    if ids["eom"] is None:
        ids["eom"] = _first(by_text, _EOM_TEXTS)
    return ids


def _fim_ids(f: "GGUFFile", by_text: Mapping[str, int], *, n_vocab: int) -> dict[str, int]:
    ids = {}
    for part, texts in _FIM_TEXTS.items():
        token_id = _special_id(f, f"fim_{part}", n_vocab)
        if token_id is None:
            token_id = _first(by_text, texts)
        if token_id is not None:
            ids[part] = token_id
    return ids


def _eog_ids(
    by_text: Mapping[str, int],
    types: np.ndarray,
    ids: Mapping[str, int | None],
    fim: Mapping[str, int],
) -> frozenset[int]:
    eog = {token_id for text, token_id in by_text.items() if text in _EOG_TEXTS}
    eog |= {fim[part] for part in ("pad", "rep", "sep") if part in fim}
    eog |= {i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None}
    # llama.cpp takes every </s>; a Qwen or Gemma that writes HTML would stop at the tag.
    if _SPM_EOS in by_text and types[by_text[_SPM_EOS]] == TokenType.CONTROL:
        eog.add(by_text[_SPM_EOS])
    if _ends_only_a_channel(by_text):
        eog.discard(by_text["<|end|>"])
    return frozenset(eog)


def _ends_only_a_channel(by_text: Mapping[str, int]) -> bool:
    """Whether ``<|end|>`` ends a part of the answer (gpt-oss, solar-open), not all of it."""
    calls = "<|call|>" in by_text or "<|calls|>" in by_text
    ends = "<|return|>" in by_text or "<|flush|>" in by_text
    return "<|end|>" in by_text and calls and ends


def _token_types(f: "GGUFFile", *, n_vocab: int) -> np.ndarray:
    key = "tokenizer.ggml.token_type"
    types = f.get(key, np.ndarray, None)
    if types is None:
        return np.full(n_vocab, TokenType.NORMAL, np.int32)
    if types.dtype.kind not in "iu":
        raise f.error(f"expected an array of integers, got {types.dtype}", key=key)
    if types.size != n_vocab:
        raise f.error(f"{types.size} token types for {n_vocab} tokens", key=key)
    if types.min() < TokenType.UNDEFINED or types.max() > TokenType.BYTE:
        bad = int(np.argmax((types < TokenType.UNDEFINED) | (types > TokenType.BYTE)))
        raise f.error(f"token {bad} has type {types[bad]}, expected 0 to 6", key=key)
    return types.astype(np.int32)


def _scores(f: "GGUFFile", *, n_vocab: int) -> np.ndarray | None:
    key = "tokenizer.ggml.scores"
    scores = f.get(key, np.ndarray, None)
    if scores is None:
        return None
    if scores.dtype not in (np.float32, np.int32):
        raise f.error(f"expected an array of float32 or int32, got {scores.dtype}", key=key)
    if scores.size != n_vocab:
        raise f.error(f"{scores.size} scores for {n_vocab} tokens", key=key)
    # Merging compares scores: with a NaN there would be no order.
    if np.isnan(scores).any():
        raise f.error(f"the score of token {int(np.isnan(scores).argmax())} is NaN", key=key)
    scores = scores.astype(np.float32)
    scores.flags.writeable = False
    return scores


def _correct_types(types: np.ndarray, by_text: Mapping[str, int], fim: Mapping[str, int]) -> None:
    """Set the types of tokens that are known by their text, then make ``types`` read-only."""
    for text, token_id in by_text.items():
        if text in _EOG_TEXTS or token_id in fim.values():
            types[token_id] = TokenType.CONTROL
        if text in _MARKUP_TEXTS or (text == "<|end|>" and _ends_only_a_channel(by_text)):
            types[token_id] = TokenType.USER_DEFINED
    types.flags.writeable = False
