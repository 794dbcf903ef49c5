"""Arrays as rules: items in order, their number, what they must contain, distinct items."""

from collections.abc import Iterator
from itertools import product as every
from typing import NamedTuple

from tamis.grammar.errors import GrammarError
from tamis.grammar.rules import Rule, Times
from tamis.grammar.schema import scalars, terminals
from tamis.grammar.schema.denied import against
from tamis.grammar.schema.forms import Arrays, Conj, both
from tamis.grammar.schema.rule_table import Rules

_MOST_FIRST = 200  # items with a schema of their own position
_MOST_STATES = 2000  # states of counting the contained items
_MOST_UNIQUE = 60  # values of items that must be distinct


class _State(NamedTuple):
    """The number of items so far, and of those like each counted thing; both capped."""

    n: int
    counts: tuple[int, ...]


class ArrayWriter:
    """Writes arrays as rules of a grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def write(self, rule: Rule, form: Arrays) -> None:
        """Add the alternatives of an array to the rule of a value."""
        if form.unique is not None and not (form.high is not None and form.high < 2):
            values = self._values(form)
            if values is not None:
                self._unique(rule, form, values)
                return
            self._rules.reader.note(form.unique, "uniqueItems")
        if form.counts:
            self._counted(rule, form)
        else:
            self._listed(rule, form)

    # --- items in order ---------------------------------------------------------------------------

    def _listed(self, rule: Rule, form: Arrays) -> None:
        low, high, value = form.low, scalars.limit(form.high), self._rules.value
        n_first = form.n_first if high is None else min(form.n_first, high)
        if n_first > _MOST_FIRST:
            raise GrammarError(
                f"JSON schema: an array has {n_first} prefixItems, expected at most {_MOST_FIRST}"
            )
        if low == 0:
            rule.add('"["', '"]"')
        if high == 0:
            return
        after = self._rest(form, n_first)
        for i in range(n_first - 1, 0, -1):
            here = self._rules.rule(form.item(i))
            if i >= low:
                here.add()
            here.add('","', value(form.item(i)), after)
            after = here
        if n_first:
            rule.add('"["', value(form.item(0)), after, '"]"')
            return
        more = self._rules.rule().add('","', value(form.item(0)))
        most = None if high is None else high - 1
        rule.add('"["', value(form.item(0)), Times(more, max(low - 1, 0), most), '"]"')

    def _rest(self, form: Arrays, n_first: int) -> Rule:
        """The rule of the items after the first ones."""
        high = scalars.limit(form.high)
        more = self._rules.rule().add('","', self._rules.value(form.item(n_first)))
        least = max(form.low - n_first, 0)
        most = None if high is None else high - n_first
        if most == 0:
            return self._rules.rule().add()
        return self._rules.rule().add(Times(more, least, most))

    # --- items that are counted -------------------------------------------------------------------

    def _counted(self, rule: Rule, form: Arrays) -> None:
        """Left-recursive rules: one for each state that a prefix of the items leads to."""
        caps = tuple(c.low if c.high is None else c.high for c in form.counts)
        high = scalars.limit(form.high)
        n_cap = max(form.n_first, form.low, 0 if high is None else high)
        n_state = n_cap + 1
        for cap in caps:
            n_state *= cap + 1
        if n_state > _MOST_STATES:
            for term in (term for count in form.counts for term in count.like):
                self._rules.reader.left_out[term.place.pointer] = None
            self._listed(rule, form)
            return
        states = self._states(form, n_cap, caps)
        for state, begun in states.items():
            enough = all(n >= c.low for n, c in zip(state.counts, form.counts, strict=True))
            if state.n >= form.low and enough:
                rule.add('"["', *([begun] if begun.rows or state.n else []), '"]"')

    def _states(self, form: Arrays, n_cap: int, caps: tuple[int, ...]) -> dict[_State, Rule]:
        start = _State(0, (0,) * len(caps))
        states, left = {start: self._rules.rule()}, [start]
        loops = scalars.limit(form.high) is None
        while left:
            state = left.pop()
            if state.n == n_cap and not loops:
                continue
            for item, counts in self._items(form, state, caps):
                then = _State(min(state.n + 1, n_cap), counts)
                if n_cap == 0:
                    then = _State(1, counts)
                if then not in states:
                    states[then] = self._rules.rule()
                    left.append(then)
                before = ['","'] if state != start else []
                begun = [states[state]] if state != start else []
                states[then].add(*begun, *before, self._rules.value(item))
        return states

    def _items(
        self, form: Arrays, state: _State, caps: tuple[int, ...]
    ) -> Iterator[tuple[Conj, tuple[int, ...]]]:
        """Yield each kind of next item as conditions, with the counts after it."""
        for alike in every((True, False), repeat=len(caps)):
            item, counts = form.item(state.n), []
            for yes, count, n, cap in zip(alike, form.counts, state.counts, caps, strict=True):
                if yes:
                    item = both(item, count.like)
                    if count.high is not None and n + 1 > count.high:
                        break
                elif count.high is not None:
                    item = both(item, against(count.like))
                counts.append(min(n + yes, cap))
            else:
                yield item, tuple(counts)

    # --- distinct items ---------------------------------------------------------------------------

    def _values(self, form: Arrays) -> list[str] | None:
        """The texts of all values that an item can have; None if there are too many."""
        if form.counts or form.n_first:
            return None
        forms = self._rules.reader.forms(form.item(0))
        if forms.array or forms.object:
            return None
        found = [
            word
            for constants in (*forms.null, *forms.boolean)
            for value, word in ((None, "null"), (True, "true"), (False, "false"))
            if any(each is value for each in constants.values)
        ]
        for number in forms.number:
            if number.low is None or number.low != number.high:
                return None
            found.append(scalars.number_text(number.low))
        for string in forms.string:
            if string.values is None:
                return None
            found += [terminals.text_of(v) for v in string.values if scalars.fits(string, v)]
        found = list(dict.fromkeys(found))
        return found if len(found) <= _MOST_UNIQUE else None

    def _unique(self, rule: Rule, form: Arrays, values: list[str]) -> None:
        """Add a rule with one bit for each value that has occurred."""
        high = scalars.limit(form.high)
        most = len(values) if high is None else min(high, len(values))
        if form.low == 0:
            rule.add('"["', '"]"')
        if most < max(form.low, 1):
            return
        rule.add('"["', self._rules.distinct(values, max(form.low, 1), most), '"]"')
