"""Functions of vocabularies: special tokens, text to tokens and back, chat templates."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_int, as_text, write_bytes
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Vocab
from tamis.bindings.flat.params import (
    LLAMA_TOKEN_ATTR_BYTE,
    LLAMA_TOKEN_ATTR_CONTROL,
    LLAMA_TOKEN_ATTR_NORMAL,
    LLAMA_TOKEN_ATTR_UNDEFINED,
    LLAMA_TOKEN_ATTR_UNKNOWN,
    LLAMA_TOKEN_ATTR_UNUSED,
    LLAMA_TOKEN_ATTR_USER_DEFINED,
    LLAMA_TOKEN_NULL,
    LLAMA_VOCAB_TYPE_BPE,
    LLAMA_VOCAB_TYPE_SPM,
    llama_chat_message,
)
from tamis.bindings.flat.status import INT32_MIN, invalid, returns
from tamis.engine.engine import Engine
from tamis.formats.vocab import TokenType
from tamis.text.chat_template import ChatTemplate, default_template

_ATTRIBUTES = {
    TokenType.UNDEFINED: LLAMA_TOKEN_ATTR_UNDEFINED,
    TokenType.NORMAL: LLAMA_TOKEN_ATTR_NORMAL,
    TokenType.UNKNOWN: LLAMA_TOKEN_ATTR_UNKNOWN,
    TokenType.CONTROL: LLAMA_TOKEN_ATTR_CONTROL,
    TokenType.USER_DEFINED: LLAMA_TOKEN_ATTR_USER_DEFINED,
    TokenType.UNUSED: LLAMA_TOKEN_ATTR_UNUSED,
    TokenType.BYTE: LLAMA_TOKEN_ATTR_BYTE,
}


def _engine(vocab: Any) -> Engine:
    return TABLE.get(vocab, Vocab).model.engine


def _token(engine: Engine, token: Any) -> int:
    return as_int(token, "token", 0, engine.hp.n_vocab - 1)


def _or_null(token: int | None) -> int:
    return LLAMA_TOKEN_NULL if token is None else token


@returns(-1)
def llama_vocab_type(vocab: int) -> int:
    """LLAMA_VOCAB_TYPE_SPM or LLAMA_VOCAB_TYPE_BPE."""
    spm = _engine(vocab).vocab.model == "llama"
    return LLAMA_VOCAB_TYPE_SPM if spm else LLAMA_VOCAB_TYPE_BPE


@returns(0)
def llama_vocab_n_tokens(vocab: int) -> int:
    """Tokens of the vocabulary."""
    return _engine(vocab).hp.n_vocab


@returns(None)
def llama_vocab_get_text(vocab: int, token: int) -> bytes | None:
    """A token as the file writes it; None for no such token."""
    engine = _engine(vocab)
    return engine.vocab.tokens[_token(engine, token)].encode("utf-8", "surrogateescape")


@returns(0.0)
def llama_vocab_get_score(vocab: int, token: int) -> float:
    """A token's score; 0 if the file has none."""
    engine = _engine(vocab)
    scores, i = engine.vocab.scores, _token(engine, token)
    return 0.0 if scores is None else float(scores[i])


@returns(LLAMA_TOKEN_ATTR_UNDEFINED)
def llama_vocab_get_attr(vocab: int, token: int) -> int:
    """The attributes of a token, of LLAMA_TOKEN_ATTR_*."""
    engine = _engine(vocab)
    return _ATTRIBUTES[TokenType(int(engine.vocab.token_types[_token(engine, token)]))]


@returns(False)
def llama_vocab_is_eog(vocab: int, token: int) -> bool:
    """Whether a token ends the answer."""
    engine = _engine(vocab)
    return _token(engine, token) in engine.tokenizer.eog


@returns(False)
def llama_vocab_is_control(vocab: int, token: int) -> bool:
    """Whether a token is a control token."""
    engine = _engine(vocab)
    return bool(engine.vocab.token_types[_token(engine, token)] == TokenType.CONTROL)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_bos(vocab: int) -> int:
    """The token that begins a text."""
    return _or_null(_engine(vocab).vocab.bos)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_eos(vocab: int) -> int:
    """The token that ends a text."""
    return _or_null(_engine(vocab).vocab.eos)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_eot(vocab: int) -> int:
    """The token that ends a turn."""
    return _or_null(_engine(vocab).vocab.eot)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_mask(vocab: int) -> int:
    """The token that stands for a masked one."""
    return _or_null(_engine(vocab).vocab.mask)


@returns(False)
def llama_vocab_get_add_sep(vocab: int) -> bool:
    """Whether the file says that a token separates texts."""
    return bool(_engine(vocab).metadata.get("tokenizer.ggml.add_sep_token", False))


@returns(())
def llama_vocab_get_suppress_tokens(vocab: int) -> tuple[int, ...]:
    """The tokens that the file says the model should not generate."""
    found = _engine(vocab).metadata.get("tokenizer.ggml.suppress_tokens", ())
    return tuple(int(token) for token in found)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_sep(vocab: int) -> int:
    """The token between sentences."""
    return _or_null(_engine(vocab).vocab.sep)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_pad(vocab: int) -> int:
    """The padding token."""
    return _or_null(_engine(vocab).vocab.pad)


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_nl(vocab: int) -> int:
    """The token of a line feed."""
    ids = _engine(vocab).tokenizer.encode("\n", add_special=False)
    return ids[-1] if ids else LLAMA_TOKEN_NULL


@returns(False)
def llama_vocab_get_add_bos(vocab: int) -> bool:
    """Whether texts begin with llama_vocab_bos."""
    return _engine(vocab).tokenizer.add_bos


@returns(False)
def llama_vocab_get_add_eos(vocab: int) -> bool:
    """Whether texts end with llama_vocab_eos."""
    return _engine(vocab).tokenizer.add_eos


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_fim_pre(vocab: int) -> int:
    """The token that marks the text before a gap."""
    return _or_null(_engine(vocab).vocab.fim.get("pre"))


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_fim_suf(vocab: int) -> int:
    """The token that marks the text after a gap."""
    return _or_null(_engine(vocab).vocab.fim.get("suf"))


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_fim_mid(vocab: int) -> int:
    """The token that marks the text that fills a gap."""
    return _or_null(_engine(vocab).vocab.fim.get("mid"))


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_fim_pad(vocab: int) -> int:
    """The padding token of infill."""
    return _or_null(_engine(vocab).vocab.fim.get("pad"))


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_fim_rep(vocab: int) -> int:
    """The token that precedes the name of a repository."""
    return _or_null(_engine(vocab).vocab.fim.get("rep"))


@returns(LLAMA_TOKEN_NULL)
def llama_vocab_fim_sep(vocab: int) -> int:
    """The token that separates files."""
    return _or_null(_engine(vocab).vocab.fim.get("sep"))


@returns(INT32_MIN)
def llama_tokenize(
    vocab: int,
    text: Any,
    text_len: int,
    tokens: Any,
    n_tokens_max: int,
    add_special: bool,
    parse_special: bool,
) -> int:
    """Write the tokens of a text; returns how many, negative if there is no room for them.

    text_len: bytes of text, -1 for all. Returns INT32_MIN for an invalid call. Bytes that are not
    UTF-8 become U+FFFD.
    """
    engine, data = _engine(vocab), as_text(text, "text").encode("utf-8", "surrogatepass")
    length = as_int(text_len, "text_len", -1, len(data))
    part = (data if length < 0 else data[:length]).decode("utf-8", "replace")
    ids = engine.tokenizer.encode(
        part, add_special=bool(add_special), parse_special=bool(parse_special)
    )
    n_max = as_int(n_tokens_max, "n_tokens_max", 0)
    if len(ids) > n_max:
        return -len(ids)
    if ids:
        as_array(tokens, np.int32, "tokens", n_max, write=True)[: len(ids)] = ids
    return len(ids)


@returns(INT32_MIN)
def llama_token_to_piece(
    vocab: int, token: int, buf: Any, length: int, lstrip: int, special: bool
) -> int:
    """Write a token's bytes; returns how many, negative if there is no room for them.

    lstrip: the most leading spaces to leave out. Returns INT32_MIN for an invalid call.
    """
    engine = _engine(vocab)
    piece = engine.tokenizer.piece(_token(engine, token), special=bool(special))
    n_space = len(piece) - len(piece.lstrip(b" "))
    return write_bytes(piece[min(as_int(lstrip, "lstrip", 0), n_space) :], buf, length, "buf")


@returns(INT32_MIN)
def llama_detokenize(
    vocab: int,
    tokens: Any,
    n_tokens: int,
    text: Any,
    text_len_max: int,
    remove_special: bool,
    unparse_special: bool,
) -> int:
    """Write the text of tokens; returns its bytes, negative if there is no room for them.

    Returns INT32_MIN for an invalid call. Bytes that are not UTF-8 become U+FFFD.
    """
    engine = _engine(vocab)
    ids = as_array(tokens, np.int32, "tokens", as_int(n_tokens, "n_tokens", 0)).tolist()
    tokenizer = engine.tokenizer
    for i in ids:
        _token(engine, i)
    if remove_special and tokenizer.add_bos and ids[:1] == [tokenizer.bos]:
        ids = ids[1:]
    if remove_special and tokenizer.add_eos and ids[-1:] == [tokenizer.eos]:
        ids = ids[:-1]
    found = tokenizer.decode(ids, special=bool(unparse_special)).encode()
    return write_bytes(found, text, text_len_max, "text")


@returns(INT32_MIN)
def llama_chat_apply_template(
    tmpl: Any,
    chat: Sequence[llama_chat_message],
    n_msg: int,
    add_ass: bool,
    buf: Any,
    length: int,
) -> int:
    """Write a conversation as text.

    Returns its bytes, even if there is no room and nothing is written.

    tmpl: a jinja template, as llama_model_chat_template returns it; None: ChatML. add_ass: end with
    the opening of the assistant's message. In this text the control tokens of messages look like
    those of the template: do not parse what users wrote; use tamis.Llama or Engine.encode_chat for
    chats.
    """
    source = default_template(["<|im_start|>"]) if tmpl is None else as_text(tmpl, "tmpl")
    n = as_int(n_msg, "n_msg", 1)
    if not isinstance(chat, Sequence) or len(chat) < n:
        invalid(f"chat is no sequence of {n} llama_chat_message")
    messages = []
    for message in chat[:n]:
        if not isinstance(message, llama_chat_message):
            invalid(f"chat has {message!r}, expected llama_chat_message")
        role, content = as_text(message.role, "role"), as_text(message.content, "content")
        messages.append({"role": role, "content": content})
    text = ChatTemplate(source).render(messages, add_generation_prompt=bool(add_ass)).encode()
    return abs(write_bytes(text, buf, length, "buf"))
