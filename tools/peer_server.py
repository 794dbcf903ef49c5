"""`tamis serve` with the flags of llama-server, and stand-ins for the models its tests name.

python -m tamis.tools.peer_server FLAGS OF LLAMA-SERVER

`tamis.tools.peer_suites` makes llama.cpp's tests start it. The translation of each flag is in
`_AS_THEY_ARE`, `_RENAMED`, `_SETTINGS` or `_DROPPED`; an unknown flag ends it.
"""

import os
import sys

from tamis.fetch import registry
from tamis.tools import peer_models

# By a part of the hub's name that a test asks for: the short name of the stand-in.
STAND_INS = (
    ("reranker", "ranker"),
    ("infill", "qwen2.5-coder-0.5b"),
    ("bge-small", "minilm"),
    ("gemma3", "gemma3-270m"),
    ("Qwen2.5-Coder", "qwen2.5-coder-0.5b"),
    ("", "smollm2"),
)
_AS_THEY_ARE = {
    "--port", "--host", "--api-key", "--alias", "--tags", "--metrics", "--no-slots",
    "--pooling", "--reranking", "--slot-save-path", "--lora", "-ctk", "-ctv", "--models-max",
    "--models-preset", "--no-models-autoload", "--chat-template", "--chat-template-file",
    "--threads", "--cors-origins", "--context-shift", "--sleep-idle-seconds", "--ssl-cert-file",
    "--ssl-key-file", "--api-prefix",
}  # fmt: skip
_RENAMED = {
    "--no-ui": "--no-page", "--ubatch-size": "--ubatch", "--parallel": "--parallel",
    "--spec-draft-n-max": "--draft-max",
}  # fmt: skip
_SETTINGS = {  # default fields of requests
    "--temp": "temperature",
    "--seed": "seed",
    "--n-predict": "n_predict",
    "--reasoning-format": "reasoning_format",
}
_DROPPED = {  # with their number of values; they have no meaning for tamis, or it decides by itself
    "--slots": 0, "--offline": 0, "--cont-batching": 0, "--embedding": 0, "--swa-full": 0,
    "--jinja": 0, "--no-jinja": 0, "--n-gpu-layers": 1, "-fa": 1,
    "--cache-ram": 1, "--no-cache-idle-slots": 0, "--no-mmproj": 0,
    "--spec-type": 1, "--spec-draft-n-min": 1, "--backend_sampling": 0,
}  # fmt: skip
_WITHOUT_VALUE = {"--metrics", "--no-slots", "--reranking", "--no-models-autoload"}
_WITHOUT_VALUE |= {"--no-ui", "--context-shift"}


def stand_in(repo: str, file: str) -> str:
    """The path of the model that stands in for a file of the hub; it is fetched if missing."""
    asked = f"{repo}/{file}"
    name = next(name for part, name in STAND_INS if part in asked)
    if name == "ranker":
        return str(peer_models.ranker())
    found = {model.name: model.path for model in registry.installed()}
    return str(registry.pull(name) if name not in found else found[name])


def translated(words: list[str]) -> list[str]:
    """The arguments of `tamis serve` for those of llama-server. Raises SystemExit."""
    given: dict[str, str] = {}
    found, fields = list[str](), dict[str, str]()
    rest = iter(words)
    for flag in rest:
        if flag in _DROPPED:
            for _ in range(_DROPPED[flag]):
                next(rest)
        elif flag in _SETTINGS:
            fields[_SETTINGS[flag]] = next(rest)
        elif flag == "--model-draft":
            found += [flag, stand_in("", next(rest))]
        elif flag == "--batch-size":  # no chunk of a prompt is longer
            found += ["--ubatch", str(min(int(next(rest)), 512))]
        elif flag == "--verbose":
            fields["verbose"] = "true"
        elif flag == "--reasoning":
            fields |= {"enable_thinking": "false"} if next(rest) == "off" else {}
        elif flag in ("--hf-repo", "--hf-file", "--model", "--ctx-size"):
            given[flag] = next(rest)
        elif flag == "--kv-unified":
            given[flag] = ""
        elif flag in _AS_THEY_ARE or flag in _RENAMED:
            found.append(_RENAMED.get(flag, flag))
            found += [] if flag in _WITHOUT_VALUE else [next(rest)]
        else:
            raise SystemExit(f"tamis has no flag for llama-server's {flag}")
    if "--api-key" in found and "--cors-origins" not in found:  # llama-server's default
        found += ["--cors-origins", "*"]
    for name, value in fields.items():
        found += ["--set", f"{name}={value}"]
    return [*found, *_model_and_context(given, found)]


def _model_and_context(given: dict[str, str], found: list[str]) -> list[str]:
    """The model, and the context of a slot: llama-server's flag counts all slots together."""
    n = int(given.get("--ctx-size", "4096"))
    slots = int(found[found.index("--parallel") + 1]) if "--parallel" in found else 1
    n_ctx = ["-c", str(n if "--kv-unified" in given else n // slots)]
    if "--model" in given:
        return ["-m", given["--model"], *n_ctx]
    if "--hf-repo" not in given and "--hf-file" not in given:
        return n_ctx  # its router
    path = stand_in(given.get("--hf-repo", ""), given.get("--hf-file", ""))
    return ["-m", path, *n_ctx]


if __name__ == "__main__":
    command = [sys.executable, "-P", "-m", "tamis", "serve", *translated(sys.argv[1:])]
    os.execv(sys.executable, command)
