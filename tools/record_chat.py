"""A chat in a pseudo-terminal, and its picture: python -m tamis.tools.record_chat docs/cast.svg.

`Screen` runs `tamis` as in a terminal and shows what a person would see. It needs the extra `test`.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path

import pexpect
import pyte

from tamis.fetch import registry as models
from tamis.jit_kernels.compile import store

ROWS, COLUMNS = 50, 80
TIMEOUT = 300  # seconds, for an answer that must wait for the compiler
FLAGS = ("--temp", "0")
LINES = (
    "Give me a Markdown list of the days from Monday to Friday.",
    "/stats",
    "/save talk",
    "/exit",
)
LINE = 19  # pixels from one line of the picture to the next
STYLE = (
    "text{font:14px/1 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dae0;"
    "opacity:0;animation:a .01s forwards}.u{fill:#7fd1b9}@keyframes a{to{opacity:1}}"
    "@media(prefers-reduced-motion){text{opacity:1;animation:none}}"
)


class Screen:
    """A `tamis` command in a terminal of ROWS x COLUMNS, in the folder `home`.

    Downloads and compiled kernels are the user's; the history of the chat is in `home`. `seen`
    collects the lines on the screen after each output of the command, `output` its bytes.
    """

    def __init__(self, *arguments: str, home: Path, **environment: str) -> None:
        self._screen = _Answering(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._typed_at = -1  # row of the prompt that was last answered
        self.seen: list[list[str]] = []
        self.output = b""
        self.child = pexpect.spawn(
            sys.executable,
            ["-P", "-m", "tamis", *arguments],
            cwd=str(home),
            env={
                "HOME": str(home),
                "LANG": "C.UTF-8",
                "TERM": "xterm-256color",
                "TAMIS_MODELS": str(models.models_folder()),
                "XDG_CACHE_HOME": str(store.user_folder().parents[1]),
                **environment,
            },
            dimensions=(ROWS, COLUMNS),
            timeout=TIMEOUT,
        )
        self._screen.answer = self.child.send

    def lines(self) -> list[str]:
        """The present screen, without empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().splitlines()

    def wait_for(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """The lines of the screen once they meet the condition. Raises TimeoutError, EOFError."""
        deadline = time.monotonic() + TIMEOUT
        while not condition(self.lines()):
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(self.lines()))
            try:
                data = self.child.read_nonblocking(4096, timeout=1)
                self.output += data
                self._stream.feed(data)
                self.seen.append(self.lines())
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                raise EOFError("\n".join(self.lines())) from None
        return self.lines()

    def wait_for_prompt(self) -> list[str]:
        """The lines once the chat waits for the next message."""
        return self.wait_for(lambda _: self._at_prompt())

    def say(self, line: str) -> None:
        """Type a line and Enter, at a prompt."""
        self._typed_at = self._screen.cursor.y
        self.child.send(line + "\r")

    def end(self) -> int:
        """The exit code of the command, once it has ended."""
        try:
            self.wait_for(lambda _: False)
        except EOFError:
            self.child.close()
        return -self.child.signalstatus if self.child.signalstatus else self.child.exitstatus

    def _at_prompt(self) -> bool:
        cursor = self._screen.cursor
        below = cursor.y > self._typed_at  # the screen is high enough that nothing scrolls
        return below and cursor.x == 2 and self._screen.display[cursor.y].rstrip() == ">"


class _Answering(pyte.Screen):
    """A screen that answers the program's query of the cursor position."""

    answer: Callable[[str], int]

    def write_process_input(self, data: str) -> None:
        self.answer(data)


def record(home: Path, lines: tuple[str, ...] = LINES) -> Screen:
    """A finished `tamis chat` in which `lines` were said, the last of them /exit."""
    # With only one model, the first lines are the same on every machine.
    folder = home / "models"
    folder.mkdir()
    path = models.pull(models.DEFAULT)
    (folder / path.name).symlink_to(path)
    screen = Screen("chat", *FLAGS, home=home, TAMIS_MODELS=str(folder))
    for line in lines:
        screen.wait_for_prompt()
        screen.say(line)
    code = screen.end()
    assert code == 0, f"exit code {code}:\n" + "\n".join(screen.lines())
    return screen


def after(lines: list[str], line: str) -> str:
    """The text below the first such line on the screen, if there is any."""
    return "\n".join(lines[lines.index(line) + 1 :]) if line in lines else ""


def picture(lines: list[str]) -> str:
    """The lines of a terminal as SVG, in which they appear one after another."""
    shown = [" ".join(("$ tamis chat", *FLAGS)), *lines]
    at, texts = 0.4, []
    for i, line in enumerate(shown):
        at += 0.9 if line.startswith("> ") else 0.12
        kind = "u" if line.startswith(("> ", "$ ")) else "t"
        texts.append(
            f'<text class="{kind}" x="14" y="{34 + LINE * i}" style="animation-delay:{at:.2f}s" '
            f'xml:space="preserve">{escape(line)}</text>'
        )
    width, height = 28 + int(8.43 * max(map(len, shown))), 34 + LINE * len(shown)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    label = 'role="img" aria-label="A chat in the terminal"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" rx="8" fill="#16181d"/>',
        *texts,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def picture_lines(svg: str) -> list[str]:
    """The texts of a picture, line by line."""
    return [unescape(line) for line in re.findall(r"<text[^>]*>(.*?)</text>", svg)]


def form(lines: list[str]) -> str:
    """Lines without their numbers, which differ from run to run.

    Nor do they have the better model that is named: it is the best for the machine's memory.
    """
    said = [line for line in lines if "-m " not in line]
    return re.sub(r"\d+(\.\d+)?", "N", "\n".join(said))


def main() -> None:
    """Record a chat and write its picture to a file, or to standard output if none is named."""
    parser = argparse.ArgumentParser(description="Record the chat that README.md shows")
    parser.add_argument("svg", nargs="?", type=Path, help="the file, docs/cast.svg in the tree")
    path = parser.parse_args().svg
    with tempfile.TemporaryDirectory() as home:
        svg = picture(record(Path(home)).lines())
    if path is None:
        print(svg, end="")
    else:
        path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
