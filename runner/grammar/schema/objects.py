"""Objects as rules: properties in the order of the schema, then others by their names."""

from itertools import combinations
from typing import NamedTuple

from tamis.grammar.probe import is_empty
from tamis.grammar.rules import Rule, Times
from tamis.grammar.schema import scalars, terminals
from tamis.grammar.schema.forms import NEVER, Conj, Layer, Objects, both
from tamis.grammar.schema.rule_table import Rules

_MOST_PATTERNS = 5
_MOST_COUNTED = 60  # optional properties that are counted
_AT_ONCE = 16  # optional properties in one rule
_MOST_NAMES = 500  # that propertyNames lists


class _Member(NamedTuple):
    """A property with a fixed position."""

    pair: Rule
    required: bool


class ObjectWriter:
    """Writes objects as rules of a grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def write(self, rule: Rule, form: Objects) -> None:
        """Add the alternatives of an object to the rule of a value."""
        members = self._members(form)
        if members is None:
            return
        more = self._rules.rule()
        for pair in self._others(form, [name for name, _ in members]):
            more.rows += pair.rows
        rows = [member for _, member in members]
        n_required = sum(member.required for member in rows)
        n_optional = len(rows) - n_required
        high = scalars.limit(form.high)
        least, most = max(form.low - n_required, 0), None if high is None else high - n_required
        if most is not None and most < 0:
            return
        few = most is not None and (bool(more.rows) or most < n_optional)
        if n_optional and (least or few):
            if n_optional <= _MOST_COUNTED:
                rule.add('"{"', self._counted(rows, more, least, most), '"}"')
                return
            if form.sized is not None:
                self._rules.reader.note(form.sized, "minProperties" if least else "maxProperties")
            least, most = 0, None
        rule.add('"{"', self._in_order(rows, more, least, most), '"}"')

    # --- properties that are named ----------------------------------------------------------------

    def _members(self, form: Objects) -> list[tuple[str, _Member]] | None:
        """Properties by name; None if a required one has a name that is not allowed."""
        names = dict.fromkeys(name for layer in form.layers for name, _ in layer.names)
        names |= dict.fromkeys(form.required)
        names |= dict.fromkeys(self._listed(form) or ())
        found = []
        for name in names:
            conj = self._rules.reader.about(form, name)
            required = name in form.required
            if not self._allowed(form, name):
                if required:
                    return None
                conj = NEVER
            key = self._rules.terminal(terminals.exact(terminals.text_of(name)))
            pair = self._rules.rule(conj).add(key, '":"', self._rules.value(conj))
            found.append((name, _Member(pair, required)))
        return found

    def _allowed(self, form: Objects, name: str) -> bool:
        strings = self._rules.reader.forms(form.keys).string
        return not form.keys or any(scalars.fits(each, name) for each in strings)

    def _listed(self, form: Objects) -> list[str] | None:
        """The names that propertyNames lists; None if it does not list them."""
        if not form.keys:
            return None
        strings = self._rules.reader.forms(form.keys).string
        found = [v for s in strings for v in s.values or () if scalars.fits(s, v)]
        listed = all(s.values is not None for s in strings) and len(found) <= _MOST_NAMES
        return list(dict.fromkeys(found)) if listed else None

    # --- others -----------------------------------------------------------------------------------

    def _others(self, form: Objects, known: list[str]) -> list[Rule]:
        """Pairs whose names have no fixed position, by the patterns that the names match."""
        if self._listed(form) is not None:
            return []
        patterns = list(dict.fromkeys(p for layer in form.layers for p, _ in layer.patterns))
        keys = terminals.STRING
        if form.keys:
            keys = self._rules.strings(self._rules.reader.forms(form.keys).string)
            if not keys:
                return []
        closed = self._rules.close and form.declared and not form.opened and form.low <= len(known)
        found = []
        for some in _classes(patterns):
            conj = _applied(form.layers, some)
            if conj == NEVER or (closed and not some):
                continue
            key = [keys, *(terminals.matching(p) for p in some)]
            key += [f"~{terminals.matching(p)}" for p in patterns if p not in some]
            key += [f"~{terminals.one_of(known)}"] if known else []
            whole = f"({' & '.join(key)})" if len(key) > 1 else keys
            if len(key) > 1 and is_empty(whole):
                continue
            pair = self._rules.rule(conj)
            found.append(pair.add(self._rules.terminal(whole), '":"', self._rules.value(conj)))
        return found

    # --- rows of properties -----------------------------------------------------------------------

    def _in_order(self, rows: list[_Member], more: Rule, least: int, most: int | None) -> Rule:
        """Properties in order, required or optional; then a number of others."""
        after: dict[int, Rule] = {len(rows): self._tail(more, least, most, begun=True)}
        for start in range((len(rows) - 1) // _AT_ONCE * _AT_ONCE, -1, -_AT_ONCE):
            after.setdefault(start, self._following(rows, start, after))
        first = self._rules.rule()
        for i, row in enumerate(rows):
            rest = after.get(i + 1) or self._following(rows, i + 1, after)
            first.add(row.pair, rest)
            if row.required:
                return first
        first.rows += self._tail(more, least, most, begun=False).rows
        return first

    def _following(self, rows: list[_Member], start: int, after: dict[int, Rule]) -> Rule:
        """The rule of what may follow a property: those from `start` on."""
        end = min((start // _AT_ONCE + 1) * _AT_ONCE, len(rows))
        row: list[str | Rule | Times] = []
        for member in rows[start:end]:
            if member.required:
                row += ['","', member.pair]
            else:
                row.append(Times(self._rules.rule().add('","', member.pair), 0, 1))
        return self._rules.rule().add(*row, after[end])

    def _counted(self, rows: list[_Member], more: Rule, least: int, most: int | None) -> Rule:
        """Properties in order, the optional ones counted up to the asked number."""
        cap = least if most is None else max(least, most)
        after: dict[tuple[int, bool], Rule] = {}
        for n in range(cap + 1):
            for begun in (False, True):
                rest = None if most is None else most - n
                if rest is None or rest >= 0:
                    after[n, begun] = self._tail(more, max(least - n, 0), rest, begun=begun)
        for member in reversed(rows):
            here = {state: self._rules.rule() for state in after}
            for (n, begun), rule in here.items():
                then = (n if member.required else min(n + 1, cap), True)
                full = not member.required and n == most
                if then in after and not full:
                    rule.add(*(['","'] if begun else []), member.pair, after[then])
                if not member.required:
                    rule.add(after[n, begun])
            after = here
        return after[0, False]

    def _tail(self, more: Rule, least: int, most: int | None, *, begun: bool) -> Rule:
        """The rule of a number of others; begun: whether a property precedes them."""
        rule = self._rules.rule()
        if least == 0:
            rule.add()
        if most == 0 or not more.rows:
            return rule
        follow = self._rules.rule().add('","', more)
        if begun:
            rule.add(Times(follow, max(least, 1), most))
        else:
            rest = None if most is None else most - 1
            rule.add(more, Times(follow, max(least - 1, 0), rest))
        return rule


def _classes(patterns: list[str]) -> list[tuple[str, ...]]:
    """The sets of patterns that a name can match: all subsets of a few, else one at most."""
    most = len(patterns) if len(patterns) <= _MOST_PATTERNS else 1
    return [some for n in range(most + 1) for some in combinations(patterns, n)]


def _applied(layers: tuple[Layer, ...], some: tuple[str, ...]) -> Conj:
    """The conditions on the value of a name that matches these patterns and no others."""
    found = []
    for layer in layers:
        said = [conj for pattern, conj in layer.patterns if pattern in some]
        found.append(both(*said) if said else layer.rest)
    return both(*found)
