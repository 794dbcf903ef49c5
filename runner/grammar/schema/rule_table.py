"""The rules and terminals of a grammar while a schema is written: one rule for each value."""

from dataclasses import replace

from tamis.grammar.characters import literal
from tamis.grammar.errors import GrammarError
from tamis.grammar.probe import is_empty
from tamis.grammar.rules import Rule
from tamis.grammar.schema import scalars
from tamis.grammar.schema.forms import Conj, Strings
from tamis.grammar.schema.reading import Reader

MOST_RULES = 60_000


class Rules:
    """Makes rules and terminals, and remembers the values whose rules are not written yet."""

    def __init__(self, reader: Reader, *, close: bool) -> None:
        self.reader, self.close = reader, close
        self.unwritten: list[Conj] = []
        self.terminals: dict[str, str] = {}  # the name of each terminal's text
        self.counted: list[str] = []  # the lines of rules that count, which are written already
        self._values: dict[Conj, Rule] = {}
        self._n_rule = 0

    def rule(self, about: object = None) -> Rule:
        """A new rule. Raises GrammarError if there are too many."""
        self._n_rule += 1
        if self._n_rule > MOST_RULES:
            raise GrammarError(
                f"JSON schema: its grammar takes more than {MOST_RULES} rules: make it smaller"
            )
        return Rule(about)

    def value(self, conj: Conj) -> Rule:
        """The rule of a value."""
        if conj not in self._values:
            self._values[conj] = self.rule(conj)
            self.unwritten.append(conj)
        return self._values[conj]

    def terminal(self, text: str) -> str:
        """The name of a terminal; a text no longer than a name stands for itself."""
        if len(text) < 24:
            return text
        return self.terminals.setdefault(text, f"T{len(self.terminals)}")

    def distinct(self, values: list[str], least: int, most: int) -> str:
        """The symbol of `least` to `most` distinct values with commas.

        Each value has a parameter bit.
        """
        name, n = f"u{len(self.counted)}", len(values)
        texts = [self.terminal(f"/{literal(value)}/") for value in values]
        first = [f"{text} {name}m::set_bit({i})" for i, text in enumerate(texts)]
        rest = [f'"" %if bit_count_ge([0:{n}], {least})']
        rest += [
            f'"," {text} {name}m::set_bit({i})'
            f" %if and(bit_clear({i}), bit_count_lt([0:{n}], {most}))"
            for i, text in enumerate(texts)
        ]
        self.counted += [f"{name}::_: " + "\n  | ".join(first)]
        self.counted += [f"{name}m::_: " + "\n  | ".join(rest)]
        return f"{name}::0x0"

    def strings(self, forms: tuple[Strings, ...]) -> str:
        """The terminal of strings that any of these forms allows; "" if there are none."""
        found = []
        for form in forms:
            text = scalars.string(form)
            if text is None:
                for test in form.tests:
                    if test.place is not None:
                        self.reader.note(test.place, test.kind)
                text = scalars.string(replace(form, tests=()))
            if text is not None and not (form.tests and is_empty(text)):
                found.append(text)
        found = list(dict.fromkeys(found))
        return f"({' | '.join(found)})" if len(found) > 1 else "".join(found)
