"""The drawing of docs/architecture.md against the imports, and imports against circles."""

import re
from collections.abc import Mapping

import pytest

from tests.tree.test_layering import MODULES, ROOT, imports

TEXT_COLUMN = 40  # of the drawing: what is right of it describes the line
BESIDE = {"tamis", "tamis.__main__", "tamis.version"}  # modules of no package


def drawn(text: str) -> dict[str, float]:
    """The line of each package of a drawing; what a line has as {a > b} goes down within it."""
    found: dict[str, float] = {}
    for number, line in enumerate(text.splitlines()):
        chain = re.search(r"(\S+)\.\{([\w,]+)\}\.\{([\w >]+)\}", line)
        if chain:
            folders = [f"{chain[1]}.{side}" for side in chain[2].split(",")]
            depths = enumerate(chain[3].split(" > "))
            found |= {f"{folder}.{x}": number + i / 10 for i, x in depths for folder in folders}
        elif several := re.search(r"(\S+)\.\{([\w,]+)\}\.(\w+)", line):
            names = several[2].split(",")
            found |= {f"{several[1]}.{side}.{several[3]}": float(number) for side in names}
        else:
            found |= {name: float(number) for name in re.findall(r"[\w.]+", line[:TEXT_COLUMN])}
    return found


def drawing() -> dict[str, float]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    return drawn(text.split("```text\n")[1].split("```")[0])


def room(module: str) -> str:
    """The package of the drawing that a module belongs to."""
    parts = module.split(".")[1:]
    if parts[0] != "jit_kernels":
        return parts[0]
    if parts[1] in ("cpu", "cuda"):
        return ".".join([*parts[:2], parts[2] if len(parts) > 2 else "lang"])
    return ".".join(parts[:2])


def graph() -> dict[str, set[str]]:
    """Every module and the modules that it imports, also where only type checkers read it."""
    found = {}
    for module, path in MODULES.items():
        names = {item.name for item in imports(path.read_text())}
        found[module] = (names & MODULES.keys()) - {module}
    return found


def wrong_arrows(lines: Mapping[str, float], arrows: Mapping[str, set[str]]) -> list[str]:
    """Imports that the drawing does not have: of a package that is not on a lower line."""
    found = []
    for module in sorted(arrows.keys() - BESIDE):
        for target in sorted(arrows[module] - BESIDE):
            upper, lower = room(module), room(target)
            if upper != lower and lines[lower] <= lines[upper]:
                found.append(f"{module} imports {target}: {upper} is not drawn above {lower}")
    return found


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, [] where there is none."""
    left = {module: set(targets) for module, targets in arrows.items()}
    while ends := {module for module, targets in left.items() if not targets & left.keys()}:
        left = {module: targets for module, targets in left.items() if module not in ends}
    if not left:
        return []
    path = [min(left)]
    while (step := min(left[path[-1]] & left.keys())) not in path:
        path.append(step)
    return path[path.index(step) :]


def test_every_package_is_drawn_and_nothing_else() -> None:
    empty = {"jit_kernels"}  # has packages only
    rooms = {room(m) for m in MODULES.keys() - BESIDE if len(m.split(".")) > 2}
    packages = {r for r in rooms if any(m.startswith(f"tamis.{r}.") for m in MODULES)}
    assert drawing().keys() == packages - empty


def test_imports_go_the_way_that_is_drawn() -> None:
    assert wrong_arrows(drawing(), graph()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(graph()) == []


@pytest.mark.parametrize(
    ("arrows", "round_trip"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c"]),
        ({"a": {"b", "x"}, "b": {"a"}}, ["a", "b"]),
    ],
)
def test_circles_are_found(arrows: dict[str, set[str]], round_trip: list[str]) -> None:
    assert circle(arrows) == round_trip


def test_wrong_arrows_are_found() -> None:
    lines = drawn("   cli\n  /   \\\n kv   select\n  x.{cpu,cuda}.{lang > kv}\n")
    assert lines == {
        "cli": 0, "kv": 2, "select": 2,
        "x.cpu.lang": 3, "x.cuda.lang": 3, "x.cpu.kv": 3.1, "x.cuda.kv": 3.1,
    }  # fmt: skip
    good = {"tamis.cli.a": {"tamis.kv.b", "tamis.version"}, "tamis.kv.b": {"tamis.kv.c"}}
    assert wrong_arrows(lines, good) == []
    for module, target in (("tamis.kv.b", "tamis.cli.a"), ("tamis.kv.b", "tamis.select.c")):
        assert len(wrong_arrows(lines, {module: {target}})) == 1
