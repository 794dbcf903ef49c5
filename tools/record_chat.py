"""A chat in a pseudo-terminal, and the README's picture of it: python -m tamis.tools.record_chat.

`Screen` runs `tamis` as in a terminal and shows what a person would see. It needs the extra `test`.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte

from tamis.fetch import registry as models
from tamis.jit_kernels.compile import store

ROWS, COLUMNS = 50, 80
TIMEOUT = 300  # seconds, for an answer that must wait for the compiler
FLAGS = ("--temp", "0")
LINES = ("Give me a Markdown list of five fruits.", "/stats", "/save talk", "/exit")
BEGIN, END = "<!-- cast: begin -->", "<!-- cast: end -->"


class Screen:
    """A `tamis` command in a terminal of ROWS x COLUMNS, in the folder `home`.

    What is downloaded and compiled is the user's; the history of the chat is in `home`. `seen`
    grows by the lines on the screen after each output of the command, `output` by its bytes.
    """

    def __init__(self, *arguments: str, home: Path, **environment: str) -> None:
        self._screen = _Answering(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._typed_at = -1  # row of the prompt that was answered last
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
        """The screen now, without what is empty at its end."""
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
    """A screen that answers the program's question where the cursor is."""

    answer: Callable[[str], int]

    def write_process_input(self, data: str) -> None:
        self.answer(data)


def record(home: Path, lines: tuple[str, ...] = LINES) -> Screen:
    """A finished `tamis chat` in which `lines` were said, the last of them /exit."""
    # With one model there and no other, the first lines say the same on every machine.
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
    """What stands below the first such line on the screen, where there is one."""
    return "\n".join(lines[lines.index(line) + 1 :]) if line in lines else ""


def picture(lines: list[str]) -> str:
    """The block that stands between the marks in README.md."""
    command = " ".join(("$ tamis chat", *FLAGS))
    return "\n".join((BEGIN, "```text", command, *lines, "```", END))


def picture_in(readme: str) -> str:
    """The block in the text of README.md, with its marks."""
    return readme[readme.index(BEGIN) : readme.index(END) + len(END)]


def form(block: str) -> str:
    """A picture without what differs from run to run: its numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", block)


def main() -> None:
    """Record a chat and put it into README.md, or print it where no file is named."""
    parser = argparse.ArgumentParser(description="Record the chat that README.md shows")
    parser.add_argument("readme", nargs="?", type=Path, help="the file with the marks")
    readme = parser.parse_args().readme
    with tempfile.TemporaryDirectory() as home:
        block = picture(record(Path(home)).lines())
    if readme is None:
        print(block)
        return
    text = readme.read_text(encoding="utf-8")
    readme.write_text(text.replace(picture_in(text), block), encoding="utf-8")


if __name__ == "__main__":
    main()
