"""Small faults of a source: the possible ones, and the text that each makes of it."""

import ast
import builtins
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
CALLED = {
    "fullmatch": "match", "match": "search", "min": "max", "max": "min", "any": "all", "all": "any",
    "startswith": "endswith", "endswith": "startswith", "lstrip": "rstrip", "rstrip": "lstrip",
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of a source: bytes start .. end - 1 of it become `text`, on as many lines."""

    file: str  # below the root of the tree
    line: int
    kind: str
    where: str  # the function, without its class; "" for code that runs at import
    start: int
    end: int
    text: str
    old: str
    number: int  # among faults of this kind and old text in this function
    names: tuple[str, ...] = ()  # names bound by the statement, outside functions

    @property
    def key(self) -> str:
        """A key that stays the same when lines elsewhere change."""
        parts = (self.file, self.where, self.kind, self.old, self.text, str(self.number))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def planted(self, source: str) -> str:
        """The source with the fault."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.text))
        return f"{self.file}:{self.line} {self.kind}: {old} -> {new}"


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults of a source, in order: none in messages or annotations."""
    return list(_Finder(file, source).faults(ast.parse(source), "", ()))


def compiles(source: str) -> bool:
    """Whether a source can be compiled: a fault may make a `return` or a `break` impossible."""
    try:
        compile(source, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._numbers = Counter[tuple[str, ...]]()

    def faults(self, node: ast.AST, where: str, names: tuple[str, ...]) -> Iterator[Fault]:
        """The faults of a node and of those in it."""
        for kind, text in _edits(node):
            yield self._fault(node, where, names, kind, text)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{where}.{node.name}" if where else node.name
        for child in ast.iter_child_nodes(node):
            if _is_said(node, child):
                continue
            at, bound = where, names
            if isinstance(node, FUNCTIONS) and child in _evaluated_in(node):
                at = where or "<lambda>" if isinstance(node, ast.Lambda) else inner
            elif isinstance(node, ast.ClassDef | ast.Module) and not where:
                bound = _names(child)
            yield from self.faults(child, at, bound)

    def _fault(
        self, node: ast.AST, where: str, names: tuple[str, ...], kind: str, text: str
    ) -> Fault:
        assert isinstance(node, ast.expr | ast.stmt)
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = self._source[start:end].decode()
        lines = "\n" * old.count("\n")
        text = f"({text}{lines})" if isinstance(node, ast.expr) else text + lines
        number = self._numbers[where, kind, old]
        self._numbers[where, kind, old] += 1
        return Fault(self._file, node.lineno, kind, where, start, end, text, old, number, names)


def _edits(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kind and the new text of each fault of one node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            yield "comparison", _with(node, ops=[COMPARED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in SWAPPED and not (_is_text(node) or _is_type(node)):
            yield "arithmetic", _with(node, op=SWAPPED[type(op)]())
        case ast.BoolOp(op=ast.And()):
            yield "condition", _with(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield "condition", _with(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", ast.unparse(node.operand)
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "boundary", str(value + 1)
            if value > 0:
                yield "boundary", str(value - 1)
        case ast.Constant(value=float(value)):
            yield "constant", repr(2 * value if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            yield "call", _with(node, func=ast.Name(CALLED[name]))
        case ast.Call(func=ast.Attribute(attr=name)) if name in CALLED:
            yield "call", _with(node, func=_renamed(node.func, CALLED[name]))
        case ast.Raise():
            yield "raise dropped", "pass"
        case ast.Continue():
            yield "jump", "break"
        case ast.Break():
            yield "jump", "continue"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "statement removed", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement removed", "pass"


def _with(node: ast.AST, **fields: object) -> str:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return ast.unparse(other)


def _renamed(node: ast.expr, name: str) -> ast.expr:
    other = copy.copy(node)
    assert isinstance(other, ast.Attribute)
    other.attr = name
    return other


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operation joins or formats texts: `-` of them is an error that any test finds."""
    ends = (node.left, node.right)
    return any(
        isinstance(end, ast.JoinedStr)
        or (isinstance(end, ast.Constant) and isinstance(end.value, str | bytes))
        for end in ends
    )


def _is_type(node: ast.expr) -> bool:
    """Whether an operation joins types, as in `str | None`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_type(node.left) or _is_type(node.right)
    if isinstance(node, ast.Constant):
        return node.value is None
    name = ast.unparse(node).partition("[")[0].rpartition(".")[2]
    return name in vars(builtins) or (name[:1].isupper() and not name.isupper())


def _is_said(node: ast.AST, child: ast.AST) -> bool:
    """Whether a child is only a message or an annotation, which no test checks."""
    if isinstance(child, ast.JoinedStr):  # their positions are wrong before Python 3.12
        return True
    if isinstance(node, ast.AnnAssign):
        return child is node.annotation
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return child is node.returns
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.arg | ast.Raise | ast.Assert)


def _evaluated_in(node: ast.AST) -> list[ast.AST]:
    """The children that run when a function is called, rather than where it is defined."""
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else [body]


def _names(node: ast.AST) -> tuple[str, ...]:
    """The names that a statement binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    elif isinstance(node, ast.For):  # it binds nothing but what its calls do to those they name
        return tuple(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id[0] != "_")
    return tuple(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
