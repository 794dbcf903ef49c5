"""Writes GBNF's trees as llguidance's Lark.

llguidance matches a terminal greedily, whereas GBNF allows every way to parse a text. A part
without recursion becomes a terminal if both mean the same: if no character that may follow it could
also continue it, or it together with another terminal. Elsewhere each character is a terminal of
its own.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tamis.grammar.characters import Characters, joined, overlap, plain
from tamis.grammar.errors import GrammarError
from tamis.grammar.gbnf.parsing import Reference, Token
from tamis.grammar.probe import is_empty, trouble
from tamis.grammar.rules import CompiledGrammar, Rule, finished, levels, reachable, written
from tamis.grammar.rules import Times as Repeated
from tamis.grammar.trees import (
    MOST_FORCED,
    Chars,
    Either,
    Node,
    Row,
    Times,
    TooLong,
    nullable,
    regex,
    shortest,
)

_MOST_NODES, _MOST_LEVELS = 100_000, 100  # of a terminal
_MOST_DEPTH = 1500  # of rules that lead to each other; at 1,600 llguidance's compiler crashes
_MOST_PROBES = 300
_MOST_LEAVES = 60  # leaves that are compared with each other
_NO_CHARACTERS = Characters()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tree without recursion within a row of a rule."""

    tree: Node


def grammar(rules: dict[str, Node], token: Callable[[Token], str]) -> CompiledGrammar:
    """The grammar of these rules; token: the symbol of a token.

    Raises GrammarError if no finite text matches it, or if it would take long. A grammar without
    recursion becomes one terminal.
    """
    writer = _Writer(rules, token)
    _check_forced(rules, writer.flat)
    flat = writer.flat["root"]
    root = None if flat is None else flat.tree
    if root is not None and not trouble(_terminal(root)):
        if is_empty(_terminal(root)) and not nullable(root):
            raise _endless()
        empty = ' | ""' if nullable(root) else ""
        return CompiledGrammar(f"start: ROOT{empty}\nROOT: {_terminal(root)}\n")
    return writer.grammar()


def _endless() -> GrammarError:
    remedy = "give each recursive rule an alternative that does not refer to it"
    return GrammarError(f"grammar: no finite text matches its rule root, expected one: {remedy}")


class _Writer:
    def __init__(self, rules: dict[str, Node], token: Callable[[Token], str]) -> None:
        self.rules, self.token = rules, token
        self.flat = _without_recursion(rules)
        self.exploded: set[Node] = set()  # trees whose characters are separate terminals
        self.n_probe = 0

    def grammar(self) -> CompiledGrammar:
        start = self._built()
        n_level = levels(start, set(reachable(start)))
        if n_level > _MOST_DEPTH:
            raise GrammarError(
                f"grammar: {n_level} rules lead from one to the next, expected at most "
                f"{_MOST_DEPTH}: write repetitions as {{m,n}}, * or +"
            )
        while (found := self._conflict(start)) is not None:
            self.exploded |= found
            start = self._built()
        alive = finished(start)
        if start not in alive:
            raise _endless()
        return CompiledGrammar("\n".join(written(start, alive)) + "\n", levels(start, alive))

    # --- rules ------------------------------------------------------------------------------------

    def _built(self) -> Rule:
        """The rules of the grammar, with leaves in their rows, then their terminals."""
        self._named: dict[str, Rule] = {}
        self._left: list[str] = []
        self._leaves: dict[Node, str] = {}
        start = self._reference("root")
        while self._left:
            name = self._left.pop()
            self._fill(self._named[name], self.rules[name])
        return start

    def _reference(self, name: str) -> Rule:
        passed = set()
        while isinstance(tree := self.rules[name], Reference) and name not in passed:
            passed.add(name)
            name = tree.name
        if name not in self._named:
            self._named[name] = Rule(name)
            self._left.append(name)
        return self._named[name]

    def _regular(self, node: Node) -> Node | None:
        """A part with its rules expanded, None if that is impossible."""
        found = _written_out(node, self.flat)
        return None if found is None else found.tree

    def _fill(self, rule: Rule, node: Node) -> None:
        for part in node.parts if isinstance(node, Either) else (node,):
            rule.add(*self._row(part))

    def _row(self, node: Node) -> list["str | Rule | Repeated"]:
        found: list[str | Rule | Repeated] = []
        run: list[Node] = []
        for part in node.parts if isinstance(node, Row) else (node,):
            if (flat := self._regular(part)) is not None:
                run += flat.parts if isinstance(flat, Row) else (flat,)
                continue
            found += self._leaf(run)
            run = []
            found.append(self._symbol(part))
        return found + self._leaf(run)

    def _symbol(self, node: Node) -> "str | Rule | Repeated":
        match node:
            case Reference(name):
                return self._reference(name)
            case Token():
                return self.token(node)
            case Times(what, least, most):
                return Repeated(self._rule(what), least, most)
        return self._rule(node)

    def _rule(self, node: Node) -> Rule:
        rule = Rule()
        self._fill(rule, node)
        return rule

    def _leaf(self, run: list[Node]) -> list["str | Rule | Repeated"]:
        """The symbols of a row of trees: one terminal, or those of its characters."""
        if not run:
            return []
        tree = run[0] if len(run) == 1 else Row(tuple(run))
        if tree not in self.exploded and not _is_text(tree) and trouble(_terminal(tree)):
            self.exploded.add(tree)
        if tree in self.exploded:
            return self._characters(tree)
        text = _terminal(tree)
        self._leaves[tree] = text
        return (
            [Repeated(Rule(Leaf(tree)).add(text), 0, 1)]
            if nullable(tree)
            else [Rule(Leaf(tree)).add(text)]
        )

    def _characters(self, node: Node) -> list["str | Rule | Repeated"]:
        match node:
            case Row(parts):
                return [symbol for part in parts for symbol in self._characters(part)]
            case Either(parts):
                rule = Rule()
                for part in parts:
                    rule.add(*self._characters(part))
                return [rule]
            case Times(what, least, most):
                return [Repeated(Rule().add(*self._characters(what)), least, most)]
        self._leaves[node] = _terminal(node)
        return [Rule(Leaf(node)).add(_terminal(node))]

    # --- terminals that llguidance would match too far
    # ---------------------------------------------

    def _conflict(self, start: Rule) -> set[Node] | None:
        """The trees that must be split into characters, None if there are none."""
        after = _Following(start).of_leaves()
        found: set[Node] = set()
        if len(after) > _MOST_LEAVES:
            found = {tree for tree in after if not isinstance(tree, Chars)}
            return found or None
        for tree, follow in after.items():
            for other in after:
                if isinstance(other, Chars) or other in found or not self._may(tree, other, follow):
                    continue
                self.n_probe += 1
                if self.n_probe > _MOST_PROBES or self._goes_on(tree, other, follow):
                    found.add(other)
        return found or None

    def _may(self, tree: Node, other: Node, follow: Characters) -> bool:
        return overlap(_first(tree), _first(other)) and overlap(follow, _all(other))

    def _goes_on(self, tree: Node, other: Node, follow: Characters) -> bool:
        """Whether a match of a tree, with a character after it, is a prefix of another match."""
        after = f"/{plain(follow)}/ /(?s:.)*/"
        return not is_empty(f"(({_terminal(tree)} {after}) & {_terminal(other)})")


class _Following:
    """The characters that may follow each leaf of a grammar."""

    def __init__(self, start: Rule) -> None:
        self._rules = reachable(start)
        self._empty: set[Rule] = set()
        self._first: dict[Rule, Characters] = dict.fromkeys(self._rules, _NO_CHARACTERS)
        self._after: dict[Rule, Characters] = dict.fromkeys(self._rules, _NO_CHARACTERS)
        self._settle(self._find_first)
        self._settle(self._find_after)

    def of_leaves(self) -> dict[Node, Characters]:
        found: dict[Node, Characters] = {}
        for rule in self._rules:
            if isinstance(leaf := rule.about, Leaf):
                found[leaf.tree] = _both(found.get(leaf.tree, _NO_CHARACTERS), self._after[rule])
        return found

    def _settle(self, step: Callable[[], bool]) -> None:
        while step():
            pass

    def _find_first(self) -> bool:
        changed = False
        for rule in reversed(self._rules):
            if isinstance(leaf := rule.about, Leaf):
                first, empty = _first(leaf.tree), False
            else:
                each = [self._of_row(row) for row in rule.rows]
                first, empty = _both(*(one for one, _ in each)), any(e for _, e in each)
            if first != self._first[rule] or (empty and rule not in self._empty):
                changed = True
                self._first[rule] = first
                if empty:
                    self._empty.add(rule)
        return changed

    def _of_row(self, row: Iterable["str | Rule | Repeated"]) -> tuple[Characters, bool]:
        found: list[Characters] = []
        for symbol in row:
            if isinstance(symbol, str):  # a token
                return _both(*found), False
            rule = symbol.rule if isinstance(symbol, Repeated) else symbol
            found.append(self._first[rule])
            least = symbol.least if isinstance(symbol, Repeated) else 1
            if least and rule not in self._empty:
                return _both(*found), False
        return _both(*found), True

    def _find_after(self) -> bool:
        changed = False
        for rule in self._rules:
            for row in rule.rows:
                for i, symbol in enumerate(row):
                    if isinstance(symbol, str):
                        continue
                    below = symbol.rule if isinstance(symbol, Repeated) else symbol
                    first, empty = self._of_row(row[i + 1 :])
                    after = [self._after[below], first]
                    after += [self._after[rule]] if empty else []
                    if isinstance(symbol, Repeated) and symbol.most != 1:
                        after.append(self._first[below])
                    new = _both(*after)
                    if new != self._after[below]:
                        changed, self._after[below] = True, new
        return changed


def _both(*some: Characters) -> Characters:
    return joined(pair for each in some for pair in each.ranges)


def _terminal(tree: Node) -> str:
    found = regex(tree, plain)
    whole = f"/(?:{found})/" if found else '""'
    return f"({whole} & /(?s:.)+/)" if nullable(tree) else whole


def _first(node: Node) -> Characters:
    match node:
        case Chars(some):
            return some
        case Row(parts):
            found: list[Characters] = []
            for part in parts:
                found.append(_first(part))
                if not nullable(part):
                    break
            return _both(*found)
        case Either(parts):
            return _both(*map(_first, parts))
        case Times(what, _, most):
            return _NO_CHARACTERS if most == 0 else _first(what)
    raise AssertionError(node)


def _all(node: Node) -> Characters:
    match node:
        case Chars(some):
            return some
        case Row(parts) | Either(parts):
            return _both(*map(_all, parts))
        case Times(what, _, _):
            return _all(what)
    raise AssertionError(node)


# --- rules without recursion ----------------------------------------------------------------------


class _Flat(NamedTuple):
    """A tree without references, its number of nodes, and of its levels."""

    tree: Node
    n_node: int
    n_level: int


def _without_recursion(rules: dict[str, Node]) -> dict[str, _Flat | None]:
    """The trees of rules with other rules expanded, None for recursive, large or deep ones."""
    found: dict[str, _Flat | None] = {}
    entered: set[str] = set()
    for start in rules:
        left = [(start, False)]
        while left:
            name, below_done = left.pop()
            if below_done:
                found[name] = _written_out(rules[name], found)
            elif name not in entered:
                entered.add(name)
                left.append((name, True))
                left += [(other, False) for other in _references(rules[name])]
    return found


def _references(node: Node) -> list[str]:
    match node:
        case Reference(name):
            return [name]
        case Row(parts) | Either(parts):
            return [name for part in parts for name in _references(part)]
        case Times(what, _, _):
            return _references(what)
    return []


def _written_out(node: Node, known: dict[str, _Flat | None]) -> _Flat | None:
    match node:
        case Chars():
            return _Flat(node, 1, 1)
        case Reference(name):
            return known.get(name)
        case Times(what, least, most):
            inner = _written_out(what, known)
            if inner is None:
                return None
            tree = Times(inner.tree, least, most)
            return _within(_Flat(tree, 1 + inner.n_node, 1 + inner.n_level))
        case Row(parts) | Either(parts):
            kept = list[_Flat]()
            for part in parts:
                if (found := _written_out(part, known)) is None:
                    return None
                kept.append(found)
            n_level = 1 + max((each.n_level for each in kept), default=0)
            both = type(node)(tuple(each.tree for each in kept))
            return _within(_Flat(both, 1 + sum(each.n_node for each in kept), n_level))
    return None


def _check_forced(rules: dict[str, Node], order: Iterable[str]) -> None:
    """Raise GrammarError if a part of a rule has too many characters at least.

    order: the names of the rules, those that a rule refers to before it where that is possible.
    """
    known: dict[str, float] = dict.fromkeys(order, math.inf)

    def least(part: Node) -> float:
        return known[part.name] if isinstance(part, Reference) else 1

    changed = True
    while changed:
        changed = False
        for name, before in known.items():
            known[name] = shortest(rules[name], least, check=False)
            changed = changed or known[name] < before
    for name, node in rules.items():
        try:
            shortest(node, least)
        except TooLong:
            raise GrammarError(
                f"grammar: a part of its rule {name} has over {MOST_FORCED} characters at least, "
                "expected fewer: lower the numbers of its repetitions"
            ) from None


def _within(flat: _Flat) -> _Flat | None:
    return None if flat.n_node > _MOST_NODES or flat.n_level > _MOST_LEVELS else flat


def _is_text(tree: Node) -> bool:
    """Whether a tree is characters in sequence, which llguidance follows always."""
    parts = tree.parts if isinstance(tree, Row) else (tree,)
    return all(isinstance(part, Chars) for part in parts)
