"""The Markdown of the server's page without a browser: its own script, run by node.

It is for tests and fuzzing; a stand-in takes the place of the DOM. Each text becomes a tree of
lists: a tag, then texts and trees.
"""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

SECONDS = 30  # the time that a text may take
_STAND_IN = """
class Element {
  constructor(tag) { this.parts = [tag]; }
  append(...parts) { for (const part of parts) this.appendChild(part); }
  appendChild(part) { this.parts.push(part.parts ?? String(part)); return part; }
  addEventListener() {}
  set textContent(text) { this.parts = [this.parts[0], text]; }
}
const document = { createElement: tag => new Element(tag) };
"""
_LOOP = """
require("readline").createInterface({ input: process.stdin }).on("line", line => {
  const begin = process.cpuUsage(), into = new Element("div");
  let wrong = null;
  try { markdown(JSON.parse(line), into); } catch (error) { wrong = String(error); }
  const { user, system } = process.cpuUsage(begin);
  const seconds = (user + system) / 1e6;
  try { console.log(JSON.stringify({ tree: into.parts, wrong, seconds })); }
  catch (error) { console.log(JSON.stringify({ tree: null, wrong: String(error), seconds })); }
});
"""


def available() -> bool:
    """Whether node is installed."""
    return shutil.which("node") is not None


class PageMarkdown:
    """A process that makes trees of texts."""

    def __init__(self) -> None:
        page = (files("tamis.bindings.serve.http") / "page.html").read_text(encoding="utf-8")
        code = "".join(
            _between(page, begin, end)
            for begin, end in (
                ("function make(", "function button("),
                ("function button(", "\n}\n"),
                ("// --- Markdown", "// --- messages"),
            )
        )
        node = shutil.which("node")
        assert node is not None
        self._process = subprocess.Popen(
            [node, "-e", _STAND_IN + code + _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )

    def read(self, text: str) -> tuple[list[Any], float]:
        """The tree of a text, and the seconds of processor time that it took.

        Raises AssertionError if the script fails or its process ends.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(text).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the process has ended"
        found = json.loads(line)
        assert found["wrong"] is None, found["wrong"]
        return found["tree"], found["seconds"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def shown(tree: list[Any]) -> str:
    """All texts of a tree except those of buttons."""
    if tree[0] == "button":
        return ""
    return "".join(part if isinstance(part, str) else shown(part) for part in tree[1:])


def _between(text: str, begin: str, end: str) -> str:
    start = text.index(begin)
    last = text.index(end, start)
    return text[start : last + (len(end) if end.endswith("}\n") else 0)]
