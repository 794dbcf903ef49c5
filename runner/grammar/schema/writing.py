"""Forms written as llguidance's Lark: a rule for every part of a value.

Properties come in the order of the schema, others after them. As llama.cpp reads schemas, an object
whose properties are listed has no others unless a schema says so, and a schema without a type that
lists properties (or items) means objects (or arrays); without `close` JSON Schema's own rules hold.
"""

from dataclasses import replace

from tamis.grammar.characters import literal
from tamis.grammar.errors import GrammarError
from tamis.grammar.probe import is_empty
from tamis.grammar.rules import Rule, finished, levels, written
from tamis.grammar.schema import scalars
from tamis.grammar.schema.arrays import ArrayWriter
from tamis.grammar.schema.forms import Conj, Forms, Numbers, Strings, Term
from tamis.grammar.schema.objects import ObjectWriter
from tamis.grammar.schema.reading import Reader

MOST_RULES = 60_000


class Writer:
    """The rules of a schema."""

    def __init__(self, reader: Reader, space: str, *, close: bool) -> None:
        self.reader, self.close, self._space = reader, close, space
        self.n_rule = 0
        self._values: dict[Conj, Rule] = {}
        self._left: list[Conj] = []
        self._terminals: dict[str, str] = {}
        self._distinct: list[str] = []
        self._objects, self._arrays = ObjectWriter(self), ArrayWriter(self)

    def grammar(self, conj: Conj) -> tuple[str, int]:
        """The text of a grammar and its levels. Raises GrammarError where nothing satisfies it."""
        start = Rule(conj).add(self.value(conj))
        while self._left:
            self._write(self._left.pop())
        alive = finished(start)
        if start not in alive:
            raise self._unsatisfied(start, alive)
        lines = ['%llguidance {"ignore_once": true}', f"%ignore /{self._space}/"]
        lines += written(start, alive)
        lines += self._distinct
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines) + "\n", levels(start, alive)

    def rule(self, about: object = None) -> Rule:
        """A new rule. Raises GrammarError where there are too many."""
        self.n_rule += 1
        if self.n_rule > MOST_RULES:
            raise GrammarError(
                f"JSON schema: its grammar takes more than {MOST_RULES} rules: make it smaller"
            )
        return Rule(about)

    def value(self, conj: Conj) -> Rule:
        """The rule of a value."""
        if conj not in self._values:
            self._values[conj] = self.rule(conj)
            self._left.append(conj)
        return self._values[conj]

    def terminal(self, text: str) -> str:
        """The name of a terminal that is longer than its name."""
        if len(text) < 24:
            return text
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def distinct(self, values: list[str], least: int, most: int) -> str:
        """The symbol of different values with commas, so many: a parameter has a bit for each."""
        name, n = f"u{len(self._distinct)}", len(values)
        texts = [self.terminal(f"/{literal(value)}/") for value in values]
        first = [f"{text} {name}m::set_bit({i})" for i, text in enumerate(texts)]
        rest = [f'"" %if bit_count_ge([0:{n}], {least})']
        rest += [
            f'"," {text} {name}m::set_bit({i})'
            f" %if and(bit_clear({i}), bit_count_lt([0:{n}], {most}))"
            for i, text in enumerate(texts)
        ]
        self._distinct += [f"{name}::_: " + "\n  | ".join(first)]
        self._distinct += [f"{name}m::_: " + "\n  | ".join(rest)]
        return f"{name}::0x0"

    def _write(self, conj: Conj) -> None:
        rule = self._values[conj]
        forms = self.reader.forms(conj)
        if self.close:
            forms = _meant(forms)
        for constants in (*forms.null, *forms.boolean):
            rule.add(scalars.constant(constants))
        for number in forms.number:
            if (symbol := self._number(number, conj)) is not None:
                rule.add(symbol)
        if text := self.strings(forms.string):
            rule.add(self.terminal(text))
        for array in forms.array:
            self._arrays.write(rule, array)
        for form in forms.object:
            self._objects.write(rule, form)

    def _number(self, form: Numbers, conj: Conj) -> str | None:
        found = scalars.number(form, self._space)
        if found is None and form.whole is not False:
            for term in conj:  # a multiple, or limits that no double has
                schema = term.place.schema if isinstance(term.place.schema, dict) else {}
                keys = [key for key in ("multipleOf", "minimum", "maximum") if key in schema]
                for key in keys[:1]:
                    self.reader.note(term.place, key)
                if not keys:
                    self.reader.left_out[term.place.pointer] = None
            found = scalars.number(replace(form, multiple=None), self._space)
            found = found or scalars.number(Numbers(whole=form.whole), self._space)
        return self.terminal(found) if found and found.startswith("/") else found

    def strings(self, forms: tuple[Strings, ...]) -> str:
        """The terminal of strings of any of these forms, nothing where there are none."""
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

    # --- what is not satisfied --------------------------------------------------------------------

    def _unsatisfied(self, start: Rule, alive: set[Rule]) -> GrammarError:
        """The error that names the innermost part that nothing satisfies."""
        rule, passed = start, {start}
        last = start.about
        while True:
            last = rule.about if isinstance(rule.about, tuple) else last
            below = [
                dead
                for row in rule.rows
                for dead in row
                if isinstance(dead, Rule) and dead not in alive and dead not in passed
            ]
            if not below:
                break
            rule = below[0]
            passed.add(rule)
        terms = last if isinstance(last, tuple) else ()
        places = list(dict.fromkeys(_pointer(term) for term in terms)) or ["#"]
        return GrammarError(
            f"JSON schema: no value satisfies {' with '.join(places[:4])}: "
            "expected limits that hold together"
        )


def _pointer(term: Term) -> str:
    return term.place.pointer


def _meant(forms: Forms) -> Forms:
    """Without the types that nobody names, where a schema lists properties or items."""
    objects = any(form.declared and not form.named for form in forms.object)
    arrays = any(form.declared and not form.named for form in forms.array)
    if not objects and not arrays:
        return forms

    def kept(form: object) -> bool:
        return bool(getattr(form, "named", False) or getattr(form, "declared", False))

    return Forms(
        null=tuple(filter(kept, forms.null)),
        boolean=tuple(filter(kept, forms.boolean)),
        number=tuple(filter(kept, forms.number)),
        string=tuple(filter(kept, forms.string)),
        array=tuple(filter(kept, forms.array)) if objects else forms.array,
        object=tuple(filter(kept, forms.object)) if arrays else forms.object,
    )
