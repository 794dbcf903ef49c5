"""Writes GBNF's trees as llguidance's Lark.

llguidance matches a terminal greedily, whereas GBNF allows every way to parse a text. A part
without recursion becomes a terminal if both mean the same: if no character that may follow it could
also continue it, or it together with another terminal. Elsewhere each character is a terminal of
its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tamis.grammar.characters import Characters, joined, overlap, plain
from tamis.grammar.errors import GrammarError
from tamis.grammar.gbnf.parsing import Reference, Token
from tamis.grammar.probe import is_empty, trouble
from tamis.grammar.rules import CompiledGrammar, Rule, finished, levels, reachable, written
from tamis.grammar.rules import Times as Repeated
from tamis.grammar.trees import Chars, Either, Node, Row, Times, nullable, regex

_MOST_NODES, _MOST_LEVELS = 20_000, 100  # of a terminal
_MOST_PROBES = 300
_MOST_LEAVES = 60  # leaves that are compared with each other
_NO_CHARACTERS = Characters()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tree without recursion within a row of a rule."""

    tree: Node


def grammar(rules: dict[str, Node], token: Callable[[Token], str]) -> CompiledGrammar:
    """The grammar of these rules; token: the symbol of a token.

    Raises GrammarError if no finite text matches it. A grammar without recursion becomes one
    terminal.
    """
    writer = _Writer(rules, token)
    root = writer.flat["root"]
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
        return _written_out(node, self.flat)

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
        if tree not in self.exploded and not isinstance(tree, Chars) and trouble(_terminal(tree)):
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


def _without_recursion(rules: dict[str, Node]) -> dict[str, Node | None]:
    """The trees of rules with other rules expanded, None for recursive, large or deep ones."""
    found: dict[str, Node | None] = {}
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


def _written_out(node: Node, known: dict[str, Node | None]) -> Node | None:
    found = _replaced(node, known)
    if found is None:
        return None
    n_node, n_level = _size(found)
    return None if n_node > _MOST_NODES or n_level > _MOST_LEVELS else found


def _replaced(node: Node, known: dict[str, Node | None]) -> Node | None:
    match node:
        case Chars():
            return node
        case Reference(name):
            return known.get(name)
        case Times(what, least, most):
            inner = _replaced(what, known)
            return None if inner is None else Times(inner, least, most)
        case Row(parts) | Either(parts):
            each = [_replaced(part, known) for part in parts]
            kept = tuple(part for part in each if part is not None)
            return type(node)(kept) if len(kept) == len(each) else None
    return None


def _size(node: Node) -> tuple[int, int]:
    """The number of a tree's nodes, and of its levels."""
    match node:
        case Row(parts) | Either(parts):
            below = [_size(part) for part in parts]
            return 1 + sum(n for n, _ in below), 1 + max((n for _, n in below), default=0)
        case Times(what, _, _):
            n_node, n_level = _size(what)
            return 1 + n_node, 1 + n_level
    return 1, 1
