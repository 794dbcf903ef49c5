"""Forms written as llguidance's Lark: a rule for every part of a value.

Properties come in the order of the schema, others after them. As in llama.cpp, an object whose
properties are listed has no others unless a schema says so, and a schema without a type that lists
properties (or items) means objects (or arrays). Without `close` JSON Schema's own rules hold.
"""

from dataclasses import replace

from tamis.grammar.errors import GrammarError
from tamis.grammar.rules import Rule, finished, levels, written
from tamis.grammar.schema import scalars
from tamis.grammar.schema.arrays import ArrayWriter
from tamis.grammar.schema.forms import Conj, Forms, Numbers, Term
from tamis.grammar.schema.objects import ObjectWriter
from tamis.grammar.schema.reading import Reader
from tamis.grammar.schema.rule_table import Rules

MULTIPLE = ("multipleOf",)
LIMITS = (*MULTIPLE, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Writer:
    """Writes the values of a schema, each as a rule of the grammar."""

    def __init__(self, reader: Reader, space: str, *, close: bool) -> None:
        self._rules = rules = Rules(reader, close=close)
        self._space = space
        self._objects, self._arrays = ObjectWriter(rules), ArrayWriter(rules)

    def grammar(self, conj: Conj) -> tuple[str, int]:
        """The text of a grammar and its depth. Raises GrammarError if nothing satisfies it."""
        rules = self._rules
        start = Rule(conj).add(rules.value(conj))
        while rules.unwritten:
            self._write(rules.unwritten.pop())
        alive = finished(start)
        if start not in alive:
            raise self._unsatisfied(start, alive)
        lines = ['%llguidance {"ignore_once": true}', f"%ignore /{self._space}/"]
        lines += written(start, alive)
        lines += rules.counted
        lines += [f"{name}: {text}" for text, name in rules.terminals.items()]
        return "\n".join(lines) + "\n", levels(start, alive)

    def _write(self, conj: Conj) -> None:
        rules, rule = self._rules, self._rules.value(conj)
        forms = rules.reader.forms(conj)
        if rules.close:
            forms = _meant(forms)
        for constants in (*forms.null, *forms.boolean):
            rule.add(scalars.constant(constants))
        for number in forms.number:
            for symbol in self._number(number, conj):
                rule.add(symbol)
        if text := rules.strings(forms.string):
            rule.add(rules.terminal(text))
        for array in forms.array:
            self._arrays.write(rule, array)
        for form in forms.object:
            self._objects.write(rule, form)

    def _number(self, form: Numbers, conj: Conj) -> list[str]:
        one = scalars.number(form, self._space)
        found = [one] if one else scalars.in_parts(form, self._space)
        if not found and form.whole is not False:  # a multiple, or limits that no double has
            plain = scalars.number(replace(form, multiple=None), self._space)
            self._note_numbers(conj, MULTIPLE if plain else LIMITS)
            plain = plain or scalars.number(Numbers(whole=form.whole), self._space)
            found = [plain] if plain else []
        return [self._rules.terminal(each) if each.startswith("/") else each for each in found]

    def _note_numbers(self, conj: Conj, keys: tuple[str, ...]) -> None:
        """Note that keywords of numbers are left out wherever they stand."""
        for term in conj:
            schema = term.place.schema if isinstance(term.place.schema, dict) else {}
            for key in keys:
                if key in schema:
                    self._rules.reader.note(term.place, key)
            if not any(key in schema for key in LIMITS):
                self._rules.reader.left_out[term.place.pointer] = None

    # --- unsatisfiable parts --------------------------------------------------------------------

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
    """The forms without types that no schema names, if a schema lists properties or items."""
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
