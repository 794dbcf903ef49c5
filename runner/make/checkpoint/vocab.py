"""The vocabularies of models' folders as metadata: BPE, SentencePiece, WordPiece, Unigram."""

import base64
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tamis.formats.gguf import GGUFFile
from tamis.formats.gguf_writer import write
from tamis.formats.vocab import TokenType, Vocab, byte_of_token
from tamis.make.checkpoint.hashes import HASHES, TEXT
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Source
from tamis.make.checkpoint.special import Special
from tamis.text import pretokenize
from tamis.text.tokenizer import tokenizer_for

START = "tokenizer.ggml."
SPM_FILE, JSON_FILE = "tokenizer.model", "tokenizer.json"
NO_SCORE, PAD_SCORE = -1000.0, -10000.0
SPACE = "\u2581"


class Tokens:
    """Texts, types and scores of tokens by id, to be filled; those that are not are unused."""

    def __init__(self, n_vocab: int) -> None:
        self.texts = [f"[PAD{id}]" for id in range(n_vocab)]
        self.types = [TokenType.UNUSED] * n_vocab
        self.scores = [PAD_SCORE] * n_vocab

    def put(self, id: int, text: str, type: TokenType, score: float = NO_SCORE) -> None:
        """Set a token; ids outside of the vocabulary are left out."""
        if 0 <= id < len(self.texts):
            self.texts[id], self.types[id], self.scores[id] = text, type, score

    def put_added(self, id: int, token: Mapping[str, Any]) -> None:
        """Set a token of a list of added ones."""
        text = token["content"]
        if token.get("special") or looks_special(text):
            self.put(id, text, TokenType.CONTROL)
        else:
            self.put(id, text.replace(SPACE, " "), TokenType.USER_DEFINED)

    def add_to(self, keys: Keys, *, scores: bool) -> None:
        """Set the metadata."""
        keys.set(f"{START}tokens", "str", self.texts)
        if scores:
            keys.set(f"{START}scores", "f32", self.scores)
        keys.set(f"{START}token_type", "i32", [int(type) for type in self.types])


def looks_special(text: str) -> bool:
    """Whether a text is that of a control token, whatever its file says."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def add_bpe(source: Source, keys: Keys, pre: str | None, special: Special | None = None) -> None:
    """Set a byte-level BPE vocabulary; pre: its pre-tokenizer, if it is not to be found out.

    special: the special tokens, if a family chooses them. Raises ConvertError.
    """
    tokens = _of_json(source)
    keys.set(f"{START}model", "str", "gpt2")
    keys.set(f"{START}pre", "str", pre or "gpt-2")
    tokens.add_to(keys, scores=False)
    (special or Special(source, merges=True)).add_to(keys)
    if pre is None:
        keys.set(f"{START}pre", "str", _pre_tokenizer(keys))


def add_spm(source: Source, keys: Keys, *, also_json: bool = False) -> None:
    """Set the vocabulary of tokenizer.model. also_json: with tokenizer.json's added tokens too."""
    tokens = spm_tokens(source, also_json=also_json)
    keys.set(f"{START}model", "str", "llama")
    keys.set(f"{START}pre", "str", "default")
    tokens.add_to(keys, scores=True)
    Special(source, n_vocab=len(tokens.texts)).add_to(keys)


def spm_tokens(source: Source, *, also_json: bool = False) -> Tokens:
    """The tokens of tokenizer.model and of the lists of added ones. Raises ConvertError."""
    model = _sentencepiece(source.folder / SPM_FILE)
    tokens = Tokens(_n_vocab(source) or model.vocab_size())
    _put_pieces(tokens, model)
    for text, id in source.json("added_tokens.json").items():
        tokens.put(id, text, TokenType.USER_DEFINED)
    added = source.json("tokenizer_config.json").get("added_tokens_decoder", {})
    for id, token in added.items():
        if also_json:  # as they are: Phi-3
            tokens.put(int(id), token["content"], _declared(token))
        else:
            tokens.put_added(int(id), token)
    if also_json:
        for token in source.json(JSON_FILE).get("added_tokens", []):
            tokens.put(token["id"], token["content"], _declared(token))
    return tokens


def add_spm_of_json(source: Source, keys: Keys) -> bool:
    """Set a SentencePiece BPE vocabulary that tokenizer.json holds; False if it holds another."""
    model = source.json(JSON_FILE).get("model", {})
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        return False
    keys.set(f"{START}model", "str", "llama")
    keys.set(f"{START}pre", "str", "default")
    tokens = unscored_tokens(source)
    tokens.add_to(keys, scores=True)
    Special(source, n_vocab=len(tokens.texts)).add_to(keys)
    return True


def unscored_tokens(source: Source) -> Tokens:
    """The tokens of a tokenizer.json with bytes; all have one score, ids are as they come."""
    tokenizer = source.json(JSON_FILE)
    vocab, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens", [])
    controls = special_texts(source)
    texts = {id: text for text, id in vocab.items()}
    later = {t["id"]: t["content"] for t in added if t["id"] >= len(vocab)}
    texts.update({token["id"]: token["content"] for token in added})
    tokens = Tokens(len(vocab) + len(later))
    for id, text in texts.items():
        if byte_of_token(text) is not None and id not in later:
            type = TokenType.BYTE
        elif text in controls:
            type = TokenType.CONTROL
        else:
            type = TokenType.USER_DEFINED if id in later else TokenType.NORMAL
        tokens.put(id, text, type)
    return tokens


def special_texts(source: Source) -> frozenset[str]:
    """The texts of tokens that a tokenizer's config names as special ones."""
    config = source.json("tokenizer_config.json")
    found = [v for k, v in config.items() if k.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        found += list(more.values()) if isinstance(more, dict) else more
    texts = [v.get("content") if isinstance(v, dict) else v for v in found]
    return frozenset(text for text in texts if isinstance(text, str))


def add_wordpiece(source: Source, keys: Keys, n_types: int) -> None:
    """Set a WordPiece vocabulary: a piece that begins a word gets a mark. n_types: of tokens."""
    tokens = _of_json(source)
    pre = "jina-v2-en"  # MiniLM's; readers cut words of all vocabularies of this kind by one rule
    keys.set(f"{START}token_type_count", "u32", n_types)
    keys.set(f"{START}model", "str", "bert")
    keys.set(f"{START}pre", "str", pre)
    for id, (text, type) in enumerate(zip(tokens.texts, tokens.types, strict=True)):
        if type != TokenType.CONTROL:
            tokens.texts[id] = text[2:] if text.startswith("##") else SPACE + text
    tokens.add_to(keys, scores=False)
    Special(source, n_vocab=len(tokens.texts)).add_to(keys)
    found = HASHES.get(_digest_of(_vocab(keys)))
    if found:
        keys.set(f"{START}pre", "str", found)


def add_unigram(source: Source, keys: Keys, n_types: int) -> None:
    """Set XLM-RoBERTa's vocabulary, of sentencepiece.bpe.model or tokenizer.json."""
    path = source.folder / "sentencepiece.bpe.model"
    if path.is_file():
        tokens, prefix, squeezes, charsmap = _unigram_of_spm(source, path)
    else:
        tokens, prefix, squeezes, charsmap = _unigram_of_json(source)
    keys.set(f"{START}model", "str", "t5")
    keys.set(f"{START}pre", "str", "default")
    tokens.add_to(keys, scores=True)
    keys.set(f"{START}add_space_prefix", "bool", prefix)
    keys.set(f"{START}token_type_count", "u32", n_types)
    keys.set(f"{START}remove_extra_whitespaces", "bool", squeezes)
    if charsmap:
        keys.set(f"{START}precompiled_charsmap", "u8", list(charsmap))
    Special(source, n_vocab=len(tokens.texts)).add_to(keys)


def _unigram_of_spm(source: Source, path: Path) -> tuple[Tokens, bool, bool, bytes]:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    proto = messages.ModelProto()
    proto.ParseFromString(path.read_bytes())
    rules = proto.normalizer_spec
    model = _sentencepiece(path)
    tokens = Tokens(max(_n_vocab(source) or 0, model.vocab_size()))
    _put_pieces(tokens, model)
    # Hugging Face's ids: four of its own, and without the three that the model begins with.
    first = [("<s>", TokenType.CONTROL), ("<pad>", TokenType.CONTROL), ("</s>", TokenType.CONTROL),
             ("<unk>", TokenType.UNKNOWN)]  # fmt: skip
    tokens.texts = [text for text, _ in first] + tokens.texts[3:-1]
    tokens.types = [type for _, type in first] + tokens.types[3:-1]
    tokens.scores = [0.0] * len(first) + tokens.scores[3:-1]
    return (
        tokens,
        rules.add_dummy_prefix,
        rules.remove_extra_whitespaces,
        rules.precompiled_charsmap,
    )


def _unigram_of_json(source: Source) -> tuple[Tokens, bool, bool, bytes]:
    tokenizer, config = source.json(JSON_FILE), source.json("tokenizer_config.json")
    model = tokenizer.get("model", {})
    if model.get("type") != "Unigram":
        raise ConvertError(f"{JSON_FILE} has the model {model.get('type')}, expected Unigram")
    vocab = model["vocab"]
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    unknown = added.get(config.get("unk_token", "<unk>"), model.get("unk_id", 3))
    controls = special_texts(source)
    tokens = Tokens(max(_n_vocab(source) or 0, len(vocab)))
    for id, (text, score) in enumerate(vocab):
        type = TokenType.NORMAL
        if id == unknown:
            type = TokenType.UNKNOWN
        elif text in controls:
            type = TokenType.CONTROL
        elif id in added.values():
            type = TokenType.USER_DEFINED
        tokens.put(id, text, type, score)
    charsmap = (tokenizer.get("normalizer") or {}).get("precompiled_charsmap") or ""
    squeezes = bool(config.get("clean_up_tokenization_spaces", False))
    return tokens, config.get("add_prefix_space", True), squeezes, base64.b64decode(charsmap)


def _of_json(source: Source) -> Tokens:
    """The tokens of tokenizer.json's vocabulary and its added ones."""
    tokenizer = source.json(JSON_FILE)
    vocab = tokenizer.get("model", {}).get("vocab")
    if not isinstance(vocab, dict):
        raise ConvertError(
            f"{source.folder} has no {JSON_FILE} with a vocabulary: save the tokenizer"
        )
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    n = _n_vocab(source) or max([*vocab.values(), *added]) + 1
    if max([*vocab.values(), *added]) >= n:
        raise ConvertError(
            f"{JSON_FILE} has {max([*vocab.values(), *added]) + 1} tokens, config.json {n}"
        )
    tokens = Tokens(n)
    for text, id in vocab.items():
        tokens.put(id, text, TokenType.NORMAL)
    for id, token in added.items():
        tokens.put_added(id, token)
    return tokens


def _declared(token: Mapping[str, Any]) -> TokenType:
    return TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED


def _n_vocab(source: Source) -> int | None:
    text = source.config.get("text_config") or {}
    n = text.get("vocab_size", source.config.get("vocab_size"))
    return n if isinstance(n, int) else None


def _sentencepiece(path: Path) -> Any:
    """The SentencePiece model in a file. Raises ConvertError."""
    from sentencepiece import SentencePieceProcessor

    if not path.is_file():
        raise ConvertError(f"{path} is not there: fetch the model's tokenizer too")
    model = SentencePieceProcessor()
    try:
        model.LoadFromFile(str(path))
    except (OSError, RuntimeError) as error:
        raise ConvertError(f"{path} is no SentencePiece model: {error}") from None
    return model


def _put_pieces(tokens: Tokens, model: Any) -> None:
    for id in range(model.vocab_size()):
        type = TokenType.NORMAL
        if model.IsUnknown(id):
            type = TokenType.UNKNOWN
        elif model.IsControl(id):
            type = TokenType.CONTROL
        elif model.IsUnused(id):
            type = TokenType.UNUSED
        elif model.IsByte(id):
            type = TokenType.BYTE
        tokens.put(id, model.IdToPiece(id), type, model.GetScore(id))


def _pre_tokenizer(keys: Keys) -> str:
    """The pre-tokenizer under which the test text's hash is one of its own. Raises ConvertError."""
    vocab = _vocab(keys)
    for name in pretokenize.known():
        if HASHES.get(_digest_of(replace(vocab, pre=name))) == name:
            return name
    raise ConvertError(
        "the vocabulary is none of those whose pre-tokenizer is known by what becomes of a test "
        "text: name it with --pre, such as --pre qwen2 for a vocabulary made from Qwen2's"
    )


def _digest_of(vocab: Vocab) -> str:
    ids = tokenizer_for(vocab).encode(TEXT, add_special=True)
    return sha256(str(ids).encode()).hexdigest()[:32]


def _vocab(keys: Keys) -> Vocab:
    """The vocabulary that readers will find in these keys."""
    with tempfile.TemporaryDirectory(prefix="tamis-") as folder:
        path = Path(folder) / "vocab.gguf"
        with path.open("wb") as out:
            write(out, keys.records, [], [])
        with GGUFFile(path) as file:
            return Vocab.from_gguf(file)
