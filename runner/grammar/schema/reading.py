"""Reads schemas into forms: follows references, merges combined schemas.

Everything is bounded: levels, references, alternatives, and the total work.
"""

from collections.abc import Callable
from dataclasses import replace

from tamis.grammar.errors import GrammarError
from tamis.grammar.probe import matches
from tamis.grammar.schema import terminals
from tamis.grammar.schema.denied import Inexact, denied_forms
from tamis.grammar.schema.forms import (
    EVERY,
    NEVER,
    NOTHING,
    TYPES,
    Arrays,
    Conj,
    Forms,
    Layer,
    Objects,
    Seen,
    Term,
    both,
    product,
    union,
)
from tamis.grammar.schema.keywords import (
    OWN,
    conj_of,
    dependents,
    own_forms,
    parts,
    shown,
)
from tamis.grammar.schema.places import Document, Place, escaped, wrong

MOST_LEVELS = 60  # of schemas that are combined with each other
MOST_REFERENCES = 10_000  # in a chain of references
MOST_ALTERNATIVES = 2000
MOST_WORK = 300_000  # pairs of alternatives that are merged
_MOST_PRUNED = 4  # levels below which impossible alternatives are kept
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "$defs"}
_ANNOTATIONS |= {"definitions", "readOnly", "writeOnly", "$schema"}


class TooLarge(GrammarError):
    """There are too many alternatives."""


class Reader:
    """The forms of a document's parts, and the keywords that had to be left out."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.left_out: dict[str, None] = {}
        self._forms: dict[Conj, Forms] = {}
        self._terms: dict[Term, Forms] = {}
        self._denied: dict[Term, Forms] = {}
        self._open: set[Term] = set()  # terms that are being read
        self._level, self._work = 0, 0

    def note(self, place: Place, key: str) -> None:
        """Record that a keyword of a place is left out."""
        self.left_out[f"{place.pointer}/{escaped(key)}"] = None

    def forms(self, conj: Conj) -> Forms:
        """The alternatives of a condition. Raises GrammarError."""
        if conj not in self._forms:
            found = EVERY
            for term in conj:
                found = self.meet(found, self.term(term), term.place)
            self._forms[conj] = found
        return self._forms[conj]

    def meet(self, a: Forms, b: Forms, place: Place) -> Forms:
        """The intersection of two forms. Raises TooLarge."""
        if a is EVERY or b is EVERY:
            return b if a is EVERY else a
        met = {}
        for kind in TYPES:
            x, y = a.of(kind), b.of(kind)
            self._work += len(x) * len(y)
            if len(x) * len(y) > MOST_ALTERNATIVES * 50 or self._work > MOST_WORK:
                raise _too_large(place)
            found = product(x, y)
            if len(x) > 1 and len(y) > 1:
                found = tuple(form for form in found if not self.dead(form, _MOST_PRUNED))
            if len(found) > max(MOST_ALTERNATIVES, len(x), len(y)):
                raise _too_large(place)
            met[kind] = found
        return Forms(**met)

    def term(self, term: Term) -> Forms:
        """The alternatives of one term that must hold. Raises GrammarError."""
        if term not in self._terms:
            self._terms[term] = self._guarded(term, self._read)
        return self._terms[term]

    def guarded(self, term: Term) -> Forms:
        """The alternatives that remain if a term must not hold. Raises Inexact, GrammarError."""
        if term not in self._denied:
            self._denied[term] = self._guarded(term, self.denied)
        return self._denied[term]

    def _guarded(self, term: Term, read: Callable[[Term], Forms]) -> Forms:
        if term in self._open:
            raise wrong(term.place, "refers to itself, with no part of the value in between")
        if self._level >= MOST_LEVELS:
            raise wrong(term.place, f"lies under {MOST_LEVELS} schemas that are combined: too many")
        self._open.add(term)
        self._level += 1
        try:
            return read(term)
        finally:
            self._level -= 1
            self._open.discard(term)

    def _read(self, term: Term) -> Forms:
        if term.either is not None:
            return union(self.forms(conj) for conj in term.either)
        if term.wanted:
            return self._wanted(term.place, term.scope)
        try:
            return self.denied(term)
        except (Inexact, TooLarge):
            self.left_out[term.place.pointer] = None
            return EVERY

    def denied(self, term: Term) -> Forms:
        """The alternatives that remain if a place must not hold. Raises Inexact, GrammarError."""
        place, scope = self.followed(term.place, term.scope)
        return unseen(denied_forms(self, place, scope))

    def followed(self, place: Place, scope: tuple[str, ...]) -> tuple[Place, tuple[str, ...]]:
        """The place where a chain of bare references ends. Raises GrammarError."""
        passed: set[Place] = set()
        while True:
            schema = place.schema
            if not isinstance(schema, bool | dict):
                raise wrong(place, f"is {shown(schema)}, expected a schema: an object or a boolean")
            if self.document.is_dynamic and place.base not in scope:
                scope = (*scope, place.base)
            keys = [] if isinstance(schema, bool) else [k for k in schema if k not in _ANNOTATIONS]
            if keys not in (["$ref"], ["$dynamicRef"]):
                return place, scope
            if place in passed or len(passed) > MOST_REFERENCES:
                raise wrong(place, "refers to itself, with no part of the value in between")
            passed.add(place)
            place = self.document.target(place, keys[0], scope)

    def _wanted(self, place: Place, scope: tuple[str, ...]) -> Forms:
        place, scope = self.followed(place, scope)
        schema = place.schema
        if isinstance(schema, bool):
            return EVERY if schema else NOTHING
        found, own = EVERY, False
        for key in schema:
            if key in OWN and not own:
                own = True
                found = self.meet(found, own_forms(place, scope, self.note), place)
            elif key in _COMBINE:
                found = self.meet(found, _COMBINE[key](self, place, scope, key), place)
        return self._with_unevaluated(found, place, scope)

    def _with_unevaluated(self, found: Forms, place: Place, scope: tuple[str, ...]) -> Forms:
        if "unevaluatedProperties" in place.schema:
            rest = conj_of(place.part("unevaluatedProperties"), scope)
            objects = tuple(_closed_object(form, rest) for form in found.object)
            found = replace(found, object=objects)
        if "unevaluatedItems" in place.schema:
            rest = conj_of(place.part("unevaluatedItems"), scope)
            found = replace(found, array=tuple(_closed_array(form, rest) for form in found.array))
        return found

    # --- impossible parts
    # ---------------------------------------------------------------------------

    def nothing(self, conj: Conj, levels: int = _MOST_PRUNED) -> bool:
        """Whether no value satisfies a condition, as far as some levels show it."""
        if levels == 0 or any(term in self._open for term in conj):
            return False
        return self.all_dead(self.forms(conj), levels)

    def all_dead(self, forms: Forms, levels: int = _MOST_PRUNED) -> bool:
        """Whether all alternatives are impossible."""
        return all(self.dead(form, levels) for kind in TYPES for form in forms.of(kind))

    def dead(self, form: object, levels: int) -> bool:
        """Whether a required part of an alternative is impossible."""
        if isinstance(form, Objects):
            return any(self.nothing(self.about(form, name), levels - 1) for name in form.required)
        if isinstance(form, Arrays):
            first = range(min(form.low, form.n_first + 1))
            return any(self.nothing(form.item(i), levels - 1) for i in first)
        return False

    def about(self, form: Objects, name: str) -> Conj:
        """The condition on a property of this name."""
        return both(*(self._layer_about(layer, name) for layer in form.layers))

    def _layer_about(self, layer: Layer, name: str) -> Conj:
        said = [conj for known, conj in layer.names if known == name]
        text = terminals.text_of(name)
        said += [c for p, c in layer.patterns if matches(terminals.matching(p), text)]
        return both(*said) if said else layer.rest


def _too_large(place: Place) -> TooLarge:
    return TooLarge(
        f"JSON schema: {place.pointer} makes more than {MOST_ALTERNATIVES} alternatives with what "
        "it is combined with: expected fewer anyOf, oneOf and if that hold together"
    )


def unseen(found: Forms) -> Forms:
    """The same forms, as if no keyword had evaluated properties and items."""
    return replace(
        found,
        array=tuple(dict.fromkeys(replace(f, seen=0, seen_like=()) for f in found.array)),
        object=tuple(dict.fromkeys(replace(f, seen=Seen()) for f in found.object)),
    )


def _closed_object(form: Objects, rest: Conj) -> Objects:
    if form.seen.all:
        return form
    names = tuple((name, ()) for name in sorted(form.seen.names))
    layer = Layer(names, tuple((p, ()) for p in sorted(form.seen.patterns)), rest)
    seen = replace(form.seen, all=True)
    return replace(form, layers=(*form.layers, layer), opened=True, seen=seen)


def _closed_array(form: Arrays, rest: Conj) -> Arrays:
    if form.n_first < form.seen:
        return form
    if form.seen_like:
        term = Term(Place("#", True, ""), either=(rest, *form.seen_like))
        rest = (term,)
    layer = (((),) * form.seen, rest)
    return replace(form, layers=(*form.layers, layer), seen=1 << 62, declared=True)


# --- keywords that combine schemas ----------------------------------------------------------------


def _all_of(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    found = EVERY
    for part in parts(place, key):
        found = reader.meet(found, reader.term(Term(part, True, scope)), part)
    return found


def _any_of(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    return union(reader.term(Term(part, True, scope)) for part in parts(place, key))


def _one_of(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    terms = [Term(part, True, scope) for part in parts(place, key)]
    each = [reader.term(term) for term in terms]
    try:
        return union(_alone(reader, place, i, terms, each) for i in range(len(terms)))
    except (Inexact, TooLarge):
        reader.note(place, key)
        return union(each)


def _alone(reader: Reader, place: Place, i: int, terms: list[Term], each: list[Forms]) -> Forms:
    found = each[i]
    for j, term in enumerate(terms):
        if i != j and not reader.all_dead(reader.meet(each[i], each[j], place)):
            found = reader.meet(found, reader.guarded(replace(term, wanted=False)), place)
    return found


def _not(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    try:
        return reader.guarded(Term(place.part(key), False, scope))
    except (Inexact, TooLarge):
        reader.note(place, key)
        return EVERY


def _if(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    def branch(key: str) -> Forms:
        if key not in place.schema:
            return EVERY
        return reader.term(Term(place.part(key), True, scope))

    what, then, otherwise = Term(place.part(key), True, scope), branch("then"), branch("else")
    holds = reader.term(what)
    if "then" not in place.schema and "else" not in place.schema:
        return union([EVERY, holds]) if holds.array or holds.object else EVERY
    yes = reader.meet(holds, then, place)
    try:
        return union(
            [yes, reader.meet(reader.guarded(replace(what, wanted=False)), otherwise, place)]
        )
    except (Inexact, TooLarge):
        reader.note(place, key)
        return union([yes, otherwise])


def _reference(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    return reader.term(Term(reader.document.target(place, key, scope), True, scope))


def _dependent(reader: Reader, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    found = EVERY
    try:
        for name, then in dependents(place, key, scope):
            lacks = Objects((Layer(((name, NEVER),)),))
            has = Objects(required=(name,))
            objects = product((has,), reader.forms(then).object if then else (Objects(),))
            one = replace(EVERY, object=(lacks, *objects))
            found = reader.meet(found, one, place)
    except TooLarge:
        reader.note(place, key)
        return EVERY
    return found


_COMBINE: dict[str, Callable[[Reader, Place, tuple[str, ...], str], Forms]] = {
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _reference,
    "$dynamicRef": _reference,
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "dependencies": _dependent,
}
