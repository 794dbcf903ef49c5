"""A step that keeps the tokens a grammar allows: GBNF or a JSON schema, through llguidance.

llguidance follows the bytes of a text through an Earley parser and gives, for every step, the set
of tokens whose bytes can come next.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from tamis.platform.processes import child_environment
from tamis.sampling.base import Candidates, SamplerError, Step

# llguidance's compiler recurses along chains of rules: 4 MiB of stack end at 1,500 of them. A text
# of so few bytes has at most 700; a longer one is first compiled in a process of its own.
_SAFE_BYTES = 4096
_TRIAL_STACK = 4 << 20  # half of what threads usually have
_TRIAL_SECONDS, _TRIAL_BYTES = 30, 2 << 30
# Between the marks of a JSON text. Without a limit, small models write nothing else for ever.
_SPACE = r"[ \n\t]{0,16}"


class Pieces(Protocol):
    """What a grammar needs of a tokenizer."""

    bos: int | None
    eos: int | None
    eog: frozenset[int]

    def encode(self, text: str, *, add_special: bool = True, compose: bool = True) -> list[int]:
        """Token ids of a text; without compose they spell it to the byte."""

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of a token."""


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as e:
        raise ImportError("grammars need llguidance: pip install 'tamis[grammar]'") from e
    return llguidance


class GrammarTokenizer:
    """A vocabulary as llguidance reads it. Takes half a second for 150,000 tokens: keep it."""

    def __init__(self, tokenizer: Pieces, n_vocab: int) -> None:
        library, self.n_vocab = _llguidance(), n_vocab
        self._tokenizer = tokenizer
        if not tokenizer.eog:
            raise SamplerError("the vocabulary has no token that ends a text: no grammar can end")
        plain = [tokenizer.piece(i) for i in range(n_vocab)]
        # Tokens without bytes of their own never continue a text.
        self.special_token_ids = [i for i, piece in enumerate(plain) if not piece]
        self.tokens = [
            piece or b"\xff" + tokenizer.piece(i, special=True) for i, piece in enumerate(plain)
        ]
        eog = sorted(tokenizer.eog)
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = tokenizer.eos if tokenizer.eos is not None else eog[0]
        self.wrapped = library.LLTokenizer(
            library.TokenizerWrapper(self), n_vocab=n_vocab, eos_token=eog
        )

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False, compose=False)


def json_grammar(schema: Any) -> str:
    """A JSON schema as text for llguidance. Raises SamplerError, ImportError.

    As llama.cpp reads schemas, an object with properties has no others unless the schema says so.
    A long one is first compiled by another process, whose crash is a SamplerError here.
    """
    _try_out("schema", _schema_text(schema))
    return compile_schema(schema)


def gbnf_grammar(text: str) -> str:
    """A GBNF grammar, as llama.cpp writes it, as text for llguidance. Raises as json_grammar."""
    _try_out("gbnf", text)
    return compile_gbnf(text)


def _schema_text(schema: Any) -> str:
    try:
        return json.dumps(_closed(schema))
    except RecursionError:
        raise SamplerError("JSON schema: nested too deeply, expected fewer levels") from None


@functools.lru_cache(maxsize=16)
def _try_out(kind: str, text: str) -> None:
    """Compile a long text in a process with half of this one's stack. Raises SamplerError."""
    _llguidance()  # ImportError here, not a failure there
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _SAFE_BYTES:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tamis.sampling.grammar", kind],
            cwd="/",
            env=child_environment({}),
            input=data,
            capture_output=True,
            timeout=2 * _TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SamplerError(f"grammar: takes over {_TRIAL_SECONDS} s to compile") from None
    if done.returncode < 0:
        raise SamplerError(
            f"grammar: compiling it ends a process by signal {-done.returncode}: it is too deep, "
            "or takes too much time; expected fewer rules or $refs that lead to each other"
        )
    if done.returncode:
        raise SamplerError(done.stdout.decode("utf-8", "replace") or "grammar: cannot be compiled")


def compile_schema(schema: Any) -> str:
    """As json_grammar, in this process whatever its length."""
    text = _schema_text(schema)
    overrides: Any = {"whitespace_pattern": _SPACE}
    try:
        found = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    except ValueError as e:
        raise SamplerError(f"JSON schema: {e}") from e
    return _checked(found)


def _closed(schema: Any) -> Any:
    """A schema whose objects have the properties named in it; parts of an allOf stay open."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(found.get(key), Mapping):
            found[key] = {name: _closed(part) for name, part in found[key].items()}
    for key in ("items", "additionalProperties"):
        found |= {key: _closed(found[key])} if key in found else {}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(found.get(key), list):
            found[key] = [_closed(part) for part in found[key]]
    if "properties" in found and "allOf" not in found:
        found.setdefault("additionalProperties", False)
    return found


def compile_gbnf(text: str) -> str:
    """As gbnf_grammar, in this process whatever its length."""
    library = _llguidance()
    try:
        found = library.grammar_from("gbnf", text)
    except Exception as e:  # its parser raises whatever a wrong text runs into
        raise SamplerError(f"grammar: {e}") from e
    return _checked(found)


def _checked(grammar: str) -> str:
    wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise SamplerError(f"grammar: {messages[0].splitlines()[0]}")
    return grammar


def allowed(c: Candidates, mask: bytes, n_vocab: int) -> Candidates:
    """The candidates whose bit is set in a mask. SamplerError where there are none."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=n_vocab, bitorder="little")
    kept = c.take(bits.astype(bool)[c.ids], c.sorted)
    if not len(kept):
        raise SamplerError("the grammar allows none of the tokens left: put it first")
    return kept


class Grammar(Step):
    """Keeps the tokens that can come next; where the text may end, those that end it too."""

    def __init__(self, grammar: str, tokenizer: GrammarTokenizer) -> None:
        matcher = _llguidance().LLMatcher(tokenizer.wrapped, grammar, log_level=0)
        if matcher.is_error():
            raise SamplerError(f"grammar: {matcher.get_error().splitlines()[0]}")
        self._matcher, self._n_vocab = matcher, tokenizer.n_vocab
        self._accepted: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grammar":
        other = object.__new__(Grammar)
        other._matcher, other._n_vocab = self._matcher.deep_copy(), self._n_vocab
        other._accepted = list(self._accepted)
        return other

    def apply(self, c: Candidates) -> Candidates:
        """Return the candidates that the grammar allows. SamplerError where there are none."""
        return allowed(c, self.mask(), self._n_vocab)

    def mask(self) -> bytes:
        """The tokens that can come next, a bit each, the lowest first. Raises SamplerError."""
        found: bytes = self._matcher.compute_bitmask()
        self._raise_error()
        return found

    def accept(self, token_id: int) -> None:
        """Go on with a token. SamplerError where the grammar does not allow it; nothing changes.

        Also SamplerError where the grammar outgrows llguidance's limits: it cannot go on then.
        """
        if self._matcher.is_stopped():
            return
        if self._matcher.try_consume_tokens([token_id]) != 1:
            self._raise_error()
            raise SamplerError(f"the grammar does not allow token {token_id} here")
        self._accepted.append(token_id)

    def read(self, token_ids: Sequence[int]) -> None:
        """Take no token: a grammar is of the answer alone."""

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            # The rest of the message is the parser's state, page after page.
            raise SamplerError(f"grammar: {self._matcher.get_error().splitlines()[0]}")

    def reset(self) -> None:
        """Begin the text again."""
        self._matcher.reset()
        self._accepted = []

    def get_state(self) -> dict[str, Any]:
        """Return the tokens so far."""
        return {"accepted": list(self._accepted)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on after these tokens."""
        self.reset()
        self.accept_all(state["accepted"])

    def accept_all(self, token_ids: Iterable[int]) -> None:
        """Go on with several tokens."""
        for token_id in token_ids:
            self.accept(int(token_id))


def _trial(kind: str) -> int:
    """The trial of a text: standard input, compiled under limits; 0 where it can be used."""
    from tamis.platform.limits import limit, lower

    limit("core", 0)
    limit("stack", _TRIAL_STACK)
    limit("cpu", _TRIAL_SECONDS + 1)
    lower("cpu", _TRIAL_SECONDS)
    limit("memory", _TRIAL_BYTES)
    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    try:
        grammar = compile_schema(json.loads(text)) if kind == "schema" else compile_gbnf(text)
        Grammar(grammar, GrammarTokenizer(Bytes(), Bytes.n_vocab)).mask()
    except SamplerError as error:
        sys.stdout.write(str(error))
        return 1
    return 0


class Bytes:
    """A vocabulary of the 256 bytes and an end, for trials."""

    n_vocab = 257
    bos: int | None = None
    eos: int | None = 256
    eog = frozenset([256])

    def encode(self, text: str, *, add_special: bool = True, compose: bool = True) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """A byte; of the end nothing, unless special."""
        return bytes([token_id]) if token_id < 256 else b"<end>" * special


if __name__ == "__main__":
    sys.exit(_trial(sys.argv[1]))
