"""A step that keeps the tokens a grammar allows: GBNF or a JSON schema, through llguidance.

llguidance feeds the bytes of a text to an Earley parser and returns, for every step, the set of
tokens whose bytes can come next.
"""

import functools
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tamis.grammar.errors import GrammarError
from tamis.grammar.gbnf.compiled import compiled_gbnf
from tamis.grammar.probe import llguidance
from tamis.grammar.rules import CompiledGrammar
from tamis.grammar.schema.compiled import compiled_schema
from tamis.platform.processes import child_environment
from tamis.sampling.base import Candidates, SamplerError, Step
from tamis.sampling.vocabulary import Bytes, GrammarTokenizer

# llguidance's compiler recurses along chains of rules: 4 MiB of stack suffice for 1,500 of them.
# Deeper or long grammars are first compiled in a process of their own.
_SAFE_LEVELS, _SAFE_BYTES = 400, 200_000
_TRIAL_STACK = 4 << 20  # half of what threads usually have
_TRIAL_SECONDS, _TRIAL_BYTES = 30, 2 << 30
# White space of JSON. Without a limit, small models could write nothing else for ever.
_SPACE = r"[ \n\t]{0,16}"


def json_grammar(schema: Any) -> str:
    """A JSON schema as text for llguidance. Raises SamplerError, ImportError.

    As in llama.cpp, an object with properties has no others unless the schema says so. A large
    schema is first compiled by another process, whose crash is a SamplerError here.
    """
    return tried(compile_schema(schema)).text


def gbnf_grammar(text: str, tokenizer: GrammarTokenizer | None = None) -> str:
    """A GBNF grammar in llama.cpp's notation, as text for llguidance.

    Raises what json_grammar raises.

    tokenizer: resolves the tokens that the grammar names; without it only token numbers are
    accepted.
    """
    return tried(compile_gbnf(text, tokenizer)).text


def compile_schema(schema: Any) -> CompiledGrammar:
    """Do what json_grammar does, always in this process; returns also what is not enforced."""
    llguidance()
    try:
        return _checked(compiled_schema(schema, _SPACE))
    except GrammarError as error:
        raise SamplerError(str(error)) from None


def compile_gbnf(text: str, tokenizer: GrammarTokenizer | None = None) -> CompiledGrammar:
    """Do what gbnf_grammar does, always in this process."""
    llguidance()
    try:
        return _checked(compiled_gbnf(text, tokenizer))
    except GrammarError as error:
        raise SamplerError(str(error)) from None


def tried(grammar: CompiledGrammar) -> CompiledGrammar:
    """The grammar itself, after a trial if it is large. Raises SamplerError."""
    if grammar.n_level > _SAFE_LEVELS or len(grammar.text) > _SAFE_BYTES:
        _try_out(grammar.text)
    return grammar


@functools.lru_cache(maxsize=16)
def _try_out(text: str) -> None:
    """Compile a grammar in a process with half of this one's stack. Raises SamplerError."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tamis.sampling.grammar"],
            cwd="/",
            env=child_environment({}),
            input=text.encode(),
            capture_output=True,
            timeout=2 * _TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SamplerError(f"grammar: takes over {_TRIAL_SECONDS} s to compile") from None
    if done.returncode < 0:
        raise SamplerError(
            f"grammar: compiling it ends a process by signal {-done.returncode}: it is too deep, "
            "or takes too much time; expected fewer rules that lead to each other"
        )
    if done.returncode:
        raise SamplerError(done.stdout.decode("utf-8", "replace") or "grammar: cannot be compiled")


def _checked(grammar: CompiledGrammar) -> CompiledGrammar:
    if grammar.n_level > _SAFE_LEVELS:  # the trial compiles it
        return grammar
    wrong, messages = llguidance().LLMatcher.validate_grammar_with_warnings(grammar.text)
    if wrong:
        raise SamplerError(f"grammar: {messages[0].splitlines()[0]}")
    return grammar


def allowed(c: Candidates, mask: bytes, n_vocab: int) -> Candidates:
    """The candidates whose bit is set in a mask. Raises SamplerError if there are none."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=n_vocab, bitorder="little")
    kept = c.take(bits.astype(bool)[c.ids], c.sorted)
    if not len(kept):
        raise SamplerError("the grammar allows none of the tokens left: put it first")
    return kept


class Grammar(Step):
    """Keeps the tokens that can come next; where the text may end, also those that end it."""

    def __init__(self, grammar: str, tokenizer: GrammarTokenizer) -> None:
        matcher = llguidance().LLMatcher(tokenizer.wrapped, grammar, log_level=0)
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
        """The candidates that the grammar allows. Raises SamplerError if there are none."""
        return allowed(c, self.mask(), self._n_vocab)

    def mask(self) -> bytes:
        """The tokens that can come next, one bit each, the lowest first. Raises SamplerError."""
        found: bytes = self._matcher.compute_bitmask()
        self._raise_error()
        return found

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises SamplerError if the grammar forbids it; then nothing changes.

        It also raises SamplerError if the grammar outgrows llguidance's limits and cannot continue.
        """
        if self._matcher.is_stopped():
            return
        if self._matcher.try_consume_tokens([token_id]) != 1:
            self._raise_error()
            raise SamplerError(f"the grammar does not allow token {token_id} here")
        self._accepted.append(token_id)

    def read(self, token_ids: Sequence[int]) -> None:
        """Do nothing: a grammar covers the answer alone."""

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            # The rest of the message is a dump of the parser's state, many pages long.
            raise SamplerError(f"grammar: {self._matcher.get_error().splitlines()[0]}")

    def reset(self) -> None:
        """Restart the text."""
        self._matcher.reset()
        self._accepted = []

    def get_state(self) -> dict[str, Any]:
        """Return the tokens so far."""
        return {"accepted": list(self._accepted)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state after these tokens."""
        self.reset()
        self.accept_all(state["accepted"])

    def accept_all(self, token_ids: Iterable[int]) -> None:
        """Advance by several tokens."""
        for token_id in token_ids:
            self.accept(int(token_id))


def _trial() -> int:
    """Compile the grammar of standard input under limits, in the trial process.

    Returns 0 on success.
    """
    from tamis.platform.limits import limit, lower

    limit("core", 0)
    limit("stack", _TRIAL_STACK)
    limit("cpu", _TRIAL_SECONDS + 1)
    lower("cpu", _TRIAL_SECONDS)
    limit("memory", _TRIAL_BYTES)
    try:
        Grammar(sys.stdin.buffer.read().decode(), GrammarTokenizer(Bytes(), Bytes.n_vocab)).mask()
    except SamplerError as error:
        sys.stdout.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_trial())
