"""Chat formats that llama_cpp names, for models whose files have no template of their own.

Each is written as its models were trained. The long system prompts that some of llama_cpp's formats
contain are left out: the caller's system message stands there.
"""

import json
from dataclasses import dataclass

from tamis.text.chat_template import default_template

_LLAMA2 = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m['role'] == 'system' %}
{%- set ns.system = '<<SYS>>\\n' + m['content'] + '\\n<</SYS>>\\n\\n' %}
{%- elif m['role'] == 'assistant' %}
{{- ' ' + m['content'] + ' ' + eos_token }}
{%- else %}
{{- bos_token + '[INST] ' + ns.system + m['content'] + ' [/INST]' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}"""
_MISTRAL = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m['role'] == 'system' %}
{%- set ns.system = m['content'] + '\\n\\n' %}
{%- elif m['role'] == 'assistant' %}
{{- m['content'] + '</s>' }}
{%- else %}
{{- '[INST] ' + ns.system + m['content'] + ' [/INST]' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Turns:
    """A format in which each message stands between two fixed texts."""

    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str  # the text before an answer
    system: tuple[str, str] = ("", "")
    usual: str = ""  # the system message of a conversation without one

    @property
    def template(self) -> str:
        """The format as a chat template."""
        system, user, assistant = (
            f"{json.dumps(before)} + {{}} + {json.dumps(after)}"
            for before, after in (self.system, self.user, self.assistant)
        )
        return f"""\
{{%- set ns = namespace(system={json.dumps(self.usual)}) %}}
{{%- for m in messages %}}
{{%- if m['role'] == 'system' %}}{{% set ns.system = m['content'] %}}{{% endif %}}
{{%- endfor %}}
{{%- if ns.system %}}{{{{- {system.format("ns.system")} }}}}{{% endif %}}
{{%- for m in messages %}}
{{%- if m['role'] == 'assistant' %}}
{{{{- {assistant.format("m['content']")} }}}}
{{%- elif m['role'] != 'system' %}}
{{{{- {user.format("m['content']")} }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {json.dumps(self.answer)} }}}}{{% endif %}}"""


def _named(user: str, assistant: str, sep: str, ends: str | None = None) -> dict[str, object]:
    """The arguments of a format whose messages begin with a role and a colon."""
    return {
        "user": (f"{user}: ", sep),
        "assistant": (f"{assistant}: ", sep if ends is None else ends),
        "answer": f"{assistant}:",
    }


def _marked(user: str, assistant: str, ends: str) -> dict[str, object]:
    """The arguments of a format whose messages begin with a mark."""
    return {"user": (user, ends), "assistant": (assistant, ends), "answer": assistant}


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
_IM = ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n")
_TURNS: dict[str, tuple[Turns, str]] = {
    name: (Turns(**fields), stop)  # type: ignore[arg-type]
    for name, fields, stop in (
        ("alpaca", {**_named("### Instruction", "### Response", "\n\n", "</s>"),
                    "system": ("", "\n\n")}, "</s>"),
        ("qwen", {**_marked(*_IM), "system": ("<|im_start|>system\n", "<|im_end|>\n"),
                  "usual": "You are a helpful assistant."}, "<|im_end|>"),
        ("vicuna", {**_named("USER", "ASSISTANT", " ", "</s>"), "system": ("", " "),
                    "usual": _VICUNA}, "</s>"),
        ("oasst_llama", {**_marked("<|prompter|>", "<|assistant|>", "</s>"),
                         "system": ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n")}, "</s>"),
        ("baichuan-2", _marked("<reserved_106>", "<reserved_107>", ""), "<reserved_106>"),
        ("baichuan", _marked("<reserved_102>", "<reserved_103>", ""), "<reserved_102>"),
        ("openbuddy", {**_named("User", "Assistant", "\n"), "system": ("", "\n")}, "\nUser:"),
        ("redpajama-incite", {**_named("<human>", "<bot>", "\n"), "system": ("", "\n")},
         "<human>"),
        ("snoozy", {**_named("### Prompt", "### Response", "\n"),
                    "system": ("### Instruction:\n", "\n")}, "###"),
        ("phind", {**_named("### User Message", "### Assistant", "\n\n"),
                   "system": ("### System Prompt\n", "\n\n"),
                   "usual": "You are an intelligent programming assistant."}, "### User Message"),
        ("intel", {**_marked("### User:\n", "### Assistant:\n", "\n"),
                   "system": ("### System:\n", "\n")}, "### User:"),
        ("open-orca", {**_named("User", "Assistant", "<|end_of_turn|>\n"), "answer": "Assistant: ",
                       "system": ("", "<|end_of_turn|>\n")}, "<|end_of_turn|>"),
        ("mistrallite", {**_marked("<|prompter|>", "<|assistant|>", "</s>"),
                         "system": ("<|system|>", "</s>")}, "</s>"),
        ("zephyr", {**_marked("<|user|>\n", "<|assistant|>\n", "</s>\n"),
                    "system": ("<|system|>\n", "</s>\n")}, "</s>"),
        ("pygmalion", {**_marked("<|user|>", "<|model|>", ""), "system": ("<|system|>", "")},
         "<|user|>"),
        ("chatglm3", {**_marked("<|user|>\n ", "<|assistant|>\n ", ""), "answer": "<|assistant|>",
                      "system": ("<|system|>\n ", "")}, "<|user|>"),
        ("openchat", {**_named("GPT4 Correct User", "GPT4 Correct Assistant", "<|end_of_turn|>"),
                      "system": ("", "<|end_of_turn|>")}, "<|end_of_turn|>"),
        ("command-r", {**_marked("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
                                 "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
                                 "<|END_OF_TURN_TOKEN|>"),
                       "system": ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>",
                                  "<|END_OF_TURN_TOKEN|>")}, "<|END_OF_TURN_TOKEN|>"),
        ("saiga", {**_marked("<s>user\n", "<s>bot\n", "</s>"),
                   "system": ("<s>system\n", "</s>")}, "</s>"),
    )
}  # fmt: skip
# The template and the text that ends a message, by the format's name.
NAMED: dict[str, tuple[str, str]] = {
    "chatml": (default_template(["<|im_start|>"]), "<|im_end|>"),
    "chatml-function-calling": (default_template(["<|im_start|>"]), "<|im_end|>"),
    "gemma": (default_template(["<start_of_turn>"]), "<end_of_turn>"),
    "llama-3": (default_template(["<|start_header_id|>"]), "<|eot_id|>"),
    "llama-2": (_LLAMA2, "</s>"),
    "mistral-instruct": (_MISTRAL, "</s>"),
} | {name: (turns.template, stop) for name, (turns, stop) in _TURNS.items()}
# The files of these models have templates that know tools; these names stand for them.
OF_THE_FILE = ("chat_template.default", "functionary", "functionary-v1", "functionary-v2")
