"""A chat in the terminal with Textual: answers stream in while the window stays alive.

usage: python examples/chat_app.py [MODEL]   (needs textual; Ctrl-Q ends it)
"""

import sys

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from tamis import Llama
from tamis.fetch import registry as models


class ChatApp(App[None]):
    """An input line under the conversation."""

    AUTO_FOCUS = "Input"

    def __init__(self, llm: Llama, max_tokens: int = 256) -> None:
        super().__init__()
        self._llm, self._max_tokens = llm, max_tokens
        self.messages: list[dict[str, str]] = []

    def compose(self) -> ComposeResult:
        """The conversation and the line."""
        yield VerticalScroll(id="conversation")
        yield Input(placeholder="Ask something")

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show the question and answer it in a thread."""
        event.input.clear()
        event.input.disabled = True
        self.messages.append({"role": "user", "content": event.value})
        answer = Static(markup=False)
        question = Static(f"> {event.value}", markup=False)
        await self.query_one("#conversation").mount_all([question, answer])
        self.run_worker(lambda: self._answer(answer), thread=True)

    def _answer(self, shown: Static) -> None:
        text = ""
        for chunk in self._llm.create_chat_completion(
            self.messages, max_tokens=self._max_tokens, stream=True
        ):
            text += chunk["choices"][0]["delta"].get("content") or ""
            self.call_from_thread(shown.update, text)
        self.messages.append({"role": "assistant", "content": text})
        self.call_from_thread(self._ask_again)

    def _ask_again(self) -> None:
        line = self.query_one(Input)
        line.disabled = False
        line.focus()


def main(model: str) -> None:
    """Chat until the user leaves."""
    path = str(models.pull(model) if model in models.KNOWN else models.resolve(model))
    ChatApp(Llama(path, n_ctx=4096, verbose=False)).run()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else models.DEFAULT)
