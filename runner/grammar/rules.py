"""A context-free grammar as a graph; only rules that can end are written, as llguidance's Lark."""

from dataclasses import dataclass, field
from typing import NamedTuple


class CompiledGrammar(NamedTuple):
    """A grammar for llguidance, the depth of its rules, and the keywords that are not enforced.

    The latter are JSON Pointers into the schema.
    """

    text: str
    n_level: int = 1
    left_out: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Rule:
    """Alternatives, each a row of symbols."""

    about: object = None  # the object that the rule was made for
    rows: "list[list[str | Rule | Times]]" = field(default_factory=list)

    def add(self, *row: "str | Rule | Times") -> "Rule":
        """Add an empty alternative and return it."""
        self.rows.append(list(row))
        return self


class Times(NamedTuple):
    """A repeated rule; most None: without limit."""

    rule: Rule
    least: int
    most: int | None


def finished(start: Rule) -> set[Rule]:
    """The rules reachable from one that derive a finite text."""
    found: set[Rule] = set()
    waiting: dict[Rule, list[tuple[Rule, list[int]]]] = {}
    ready = []
    for rule in reachable(start):
        for row in rule.rows:
            needs = {need for symbol in row if (need := _needed(symbol)) is not None}
            left = [len(needs)]
            for need in needs:
                waiting.setdefault(need, []).append((rule, left))
            if not needs:
                ready.append(rule)
    while ready:
        rule = ready.pop()
        if rule in found:
            continue
        found.add(rule)
        for other, left in waiting.get(rule, ()):
            left[0] -= 1
            if not left[0]:
                ready.append(other)
    return found


def reachable(start: Rule, among: set[Rule] | None = None) -> list[Rule]:
    """A rule and all rules below it, in breadth-first order."""
    found, left = {start: None}, [start]
    while left:
        for below in _below(left.pop()):
            if below not in found and (among is None or below in among):
                found[below] = None
                left.append(below)
    return list(found)


def levels(start: Rule, alive: set[Rule]) -> int:
    """The depth of a breadth-first walk that enters each rule once."""
    entered, most = {start}, 0
    left = [iter(_below(start))]
    while left:
        most = max(most, len(left))
        for rule in left[-1]:
            if rule in alive and rule not in entered:
                entered.add(rule)
                left.append(iter(_below(rule)))
                break
        else:
            left.pop()
    return most


def _below(rule: Rule) -> list[Rule]:
    found = []
    for row in rule.rows:
        for symbol in row:
            below = symbol.rule if isinstance(symbol, Times) else symbol
            if isinstance(below, Rule):
                found.append(below)
    return found


def _needed(symbol: "str | Rule | Times") -> Rule | None:
    if isinstance(symbol, Times):
        return symbol.rule if symbol.least else None
    return symbol if isinstance(symbol, Rule) else None


def written(start: Rule, alive: set[Rule]) -> list[str]:
    """The lines of a grammar whose start rule can end."""
    names = {rule: f"r{i}" for i, rule in enumerate(reachable(start, alive))}
    names[start] = "start"
    lines: list[str] = []
    # names of terminals with &, which is only allowed in a named terminal
    terminals: dict[str, str] = {}
    for rule, name in names.items():
        rows = [_row(row, names, terminals) for row in rule.rows if _alive(row, alive)]
        lines.append(f"{name}: {' | '.join(dict.fromkeys(rows))}")
    return lines + [f"{name}: {text}" for text, name in terminals.items()]


def _alive(row: "list[str | Rule | Times]", alive: set[Rule]) -> bool:
    return all(need is None or need in alive for need in map(_needed, row))


def _row(row: "list[str | Rule | Times]", names: dict[Rule, str], terminals: dict[str, str]) -> str:
    found = []
    for symbol in row:
        if isinstance(symbol, str) and " & " in symbol:
            found.append(terminals.setdefault(symbol, f"AND{len(terminals)}"))
        elif isinstance(symbol, str):
            found.append(symbol)
        elif isinstance(symbol, Rule):
            found.append(names[symbol])
        elif symbol.rule in names and symbol.most != 0:  # llguidance refuses {0,0}
            most = "" if symbol.most is None else symbol.most
            found.append(f"{names[symbol.rule]}{{{symbol.least},{most}}}")
    return " ".join(found) or '""'
