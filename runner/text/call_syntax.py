"""Calls that are not written in JSON: Python's syntax (LFM2) and Gemma 4's objects."""

import ast
import json
import re
from typing import Any

_MAX_CHARS = 1 << 16
_MAX_DEPTH = 100
_JSON_WORDS = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return names and arguments of ``[f(a=1), g()]``; None for anything else.

    Values are literals; also true, false and null are.
    """
    for source in (text, text.replace("\n", "\\n")):  # models break lines within strings
        tree = _parsed(source)
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        try:
            return [_python_call(call) for call in calls]
        except (ValueError, RecursionError):
            continue
    return None


def python_value(text: str) -> Any:
    """Return the value of a literal that JSON has as well; None for anything else."""
    tree = _parsed(text)
    try:
        return None if tree is None else _literal(tree)
    except (ValueError, RecursionError):
        return None


def _parsed(text: str) -> ast.expr | None:
    if len(text) > _MAX_CHARS:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr | None) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _literal(keyword.value)
    json.dumps(arguments)
    return ast.unparse(call.func), arguments


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) for key in node.keys):
            raise ValueError("a key that is no literal")
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _literal(value) for key, value in pairs}  # type: ignore[union-attr]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("a value that JSON has not")
    return value


def gemma_arguments(text: str, quote: str) -> dict[str, Any] | None:
    """Return the object ``{key:1,other:[...]}`` whose texts are between two ``quote``.

    None if it is not complete.
    """
    reader = _GemmaReader(text.strip(), quote)
    try:
        value = reader.value(0)
    except (ValueError, IndexError):
        return None
    return value if isinstance(value, dict) and reader.at == len(reader.text) else None


class _GemmaReader:
    _PLAIN = re.compile(r"[^,\[\]{}]+")

    def __init__(self, text: str, quote: str):
        self.text, self.at, self._quote = text, 0, quote

    def value(self, depth: int) -> Any:
        """Read one value."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip()
        if self._take("{"):
            return dict(self._items("}", lambda: (self._key(), self.value(depth + 1))))
        if self._take("["):
            return list(self._items("]", lambda: self.value(depth + 1)))
        for quote in (self._quote, '"'):
            if self._take(quote):
                end = self.text.index(quote, self.at)
                inner, self.at = self.text[self.at : end], end + len(quote)
                return inner
        plain = self._PLAIN.match(self.text, self.at)
        if plain is None:
            raise ValueError("no value")
        self.at = plain.end()
        try:
            return json.loads(plain[0])
        except ValueError:
            return plain[0].strip()

    def _items(self, end: str, item: Any) -> list[Any]:
        found = []
        self._skip()
        while not self._take(end):
            found.append(item())
            self._skip()
            if not self._take(",") and self.text[self.at] != end:
                raise ValueError("no comma")
            self._skip()
        return found

    def _key(self) -> str:
        if self._take(self._quote):
            end = self.text.index(self._quote, self.at)
            key, self.at = self.text[self.at : end], self.text.index(":", end) + 1
            return key
        end = self.text.index(":", self.at)
        key = self.text[self.at : end].strip()
        if not key or any(c in key for c in "{}[],<"):
            raise ValueError("no key")
        self.at = end + 1
        return key

    def _take(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _skip(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
