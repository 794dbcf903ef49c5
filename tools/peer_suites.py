"""Run the tests of llama.cpp's server, or of llama-cpp-python, against tamis; print their table.

    python -m tamis.tools.peer_suites llama-server [FILE ...]
    python -m tamis.tools.peer_suites llama-cpp-python

The tests are those of the source distribution of llama-cpp-python, which pip fetches once into the
user's cache. They run unchanged except for three adjustments. `peer_server` takes llama-server's
flags and lets available models stand in for missing ones. `peer_plugin` lifts assertions on the
models' words. `COUNTS` replaces token counts of the suite's model by those that /tokenize returns,
or by the condition that there are any. Tests marked slow are not run, nor are those of `LEFT_OUT`,
which gives the reasons.

It needs pip, pytest, requests, filelock and openai, and scipy for the second suite: a file that
cannot be read fails with the name of the missing package. The last line is JSON.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from tamis.tools.peer_models import FOLDER
from tamis.tools.peer_plugin import EVENTS

VERSION = "0.3.36"
SERVER_TESTS = "vendor/llama.cpp/tools/server/tests"
FILE_SECONDS = 1800
# Reasons for leaving out tests: by file, or file::pattern of names.
LEFT_OUT = {
    "test_vision_api.py": "images",
    "test_slot_save.py::*mmproj*": "images",
    "test_slot_save.py::*image*": "images",
    "test_slot_save.py::*multimodal*": "images",
    "test_security.py::*local_media*": "images",
    "test_mcp_servers.py": "servers of MCP that llama.cpp's starts: tamis starts none",
    "test_tools_builtin.py": "tools that llama.cpp's server runs itself: tamis runs none",
    "test_proxy.py": "a proxy for its page",
    "test_security.py::*proxy*": "a proxy for its page",
    "test_security.py::*static_assets*": "files of its page",
    "test_compat_oai_responses.py::*telemetry*": "a response without tokens left ends with "
    "response.incomplete, as in OpenAI's API",
    "test_compat_anthropic.py::*image*": "images",
    "test_compat_anthropic.py::*vision*": "images",
    "test_compat_anthropic.py::test_anthropic_empty_messages": "an empty list of messages, which "
    "Anthropic's API refuses, too",
    "test_chat_completion.py::test_chat_template_assistant_prefill[[]prefill1-*": "parts of a "
    "message are joined by one line feed, here as in every other message",
    "test_basic.py::test_no_ui": "without its page tamis answers / by a line of text, which "
    "clients of Ollama ask for",
    "test_security.py::test_cors_options[[]origin-*": "CORS with cookies: tamis reads none",
    "test_security.py::test_cors_options*Allow-Headers*": "CORS names the headers asked for, not *",
    "test_security.py::*with_tools_enabled*": "tools that llama.cpp's server runs itself",
    "test_sleep.py::*buckets*": "rates of /metrics that begin anew with each reading",
    "test_kv_keep_only_active.py": "marks in llama.cpp's log",
    "test_compat_gcp.py": "Vertex AI's protocol",
    "test_speculative.py::*synth*": "drafts of a given acceptance",
    "test_speculative.py::test_with_and_without_draft": "drafts of a given acceptance",
    "test_router.py::*remote_preset*": "presets in a repository of the hub",
    "test_slot_save.py::*legacy_token_list*": "llama.cpp's file format of a slot",
}
OUT_OF_REACH = "a model of Hugging Face's Hub, which was out of reach"
# Replacements of lines of the tests: a regular expression of the whole line's code, and the new
# text.
COUNTS = (
    (
        r'(\w+(?:\.body)?)\["timings"\]\["prompt_n"\] == n_prompt$',
        r'\1["timings"]["prompt_n"] == len(server.make_request("POST", "/tokenize", '
        r'data={"content": prompt, "add_special": True}).body["tokens"])',
    ),
    (r'(\w+(?:\.body)?\["usage"\]\["prompt_tokens"\]) == n_prompt$', r"\1 > 0"),
    (r"(res\.body\[.usage.\]\[.prompt_tokens.\]) == (?:n_tokens|2 \* 9)$", r"\1 > 0"),
    (r'(res\.body\["timings"\]\["prompt_n"\]) == (?:226|21)\b', r"\1 > 0"),
    (r'(res\.body\["timings"\]\["prompt_n"\]) == 6\b', r"\1 < 6"),  # of 7 tokens
    (r'(\["cached_tokens"\]) == n_cache$', r"\1 >= 0"),
    (r'(res\.body\["n_(?:saved|restored)"\]) == 84$', r"\1 > 0"),
    (
        r'(res\.body\["timings"\]\["predicted_n"\]) == n_token_output$',
        r'\1 == (n_predict if n_predict > 0 else 256 - len(server.make_request("POST", '
        r'"/tokenize", data={"content": "Hi how are you"}).body["tokens"]))',
    ),
    # The stand-in has half as many tokens in these texts, and ends where the suite's does not.
    (r'("prompt": (?:SHORT|LONG)_TEXT),$', r"\1 * 2,"),
    (
        r'("cache_prompt": True|"speculative\.p_min": 0\.0|"prompt": "Once"),$',
        r'\1, "ignore_eos": True,',
    ),
    (
        r"n_prompt = \(40 \+ r\)\*5 \+ 2$",
        r'n_prompt = len(server.make_request("POST", "/tokenize", data={"content": prompt, '
        r'"add_special": True}).body["tokens"])',
    ),
    (r'("prompt": "I believe the meaning of life is")\*32,$', r"\1*128,"),
    (r'("content": "This is a test") \* 10\}', r"\1 * 20}"),
    # The suite's model begins a text with <s>, the stand-in with nothing.
    (r'(\["__verbose"\]\["prompt"\]) == "<s> (.*)$', r'\1.endswith("\2)'),
    (r'(res\.body\["prompt"\]) == "<s> " \+ prompt$', r"\1 == prompt"),
    # The router's models, by the names of the stand-ins.
    (r'"ggml-org/tinygemma3-GGUF:Q8_0"', '"gemma3-270m"'),
    (r'"ggml-org/test-model-stories260K-infill:F32"', '"qwen2.5-coder-0.5b"'),
    (r'"ggml-org/test-model-stories260K:F32"', '"smollm2"'),
    (r'"ggml-org/test-model-router-download:F16"', '"minilm"'),
    (
        r"spec-draft-hf = ggml-org/test-model-stories260K-infill",
        "model-draft = qwen2.5-coder-0.5b",
    ),
    (r"hf-repo = ggml-org/test-model-stories260K-infill", "model = qwen2.5-coder-0.5b"),
    (r"hf-repo = ggml-org/test-model-stories260K\b", "model = smollm2"),
    # A model that is busy: llama.cpp's server has a delay for that, tamis answers at length.
    (
        r"_Bg\(lambda: _tokenize\(MODEL_A\)\)",
        '_Bg(lambda: server.make_request("POST", "/completion", data={"model": MODEL_A, "prompt": '
        '"hello", "n_predict": 600, "ignore_eos": True}, timeout=120))',
    ),
    # The stand-in that ranks has random weights.
    (r'(most|least)_relevant\["index"\] == [23]$', r'\1_relevant["index"] in range(4)'),
    (
        r"bosId = 1$",  # the stand-in whose texts begin with BOS
        'bosId = 2; server.stop(); server.model_hf_repo = "gemma3"; server.start()',
    ),
    # Texts are tokenized without the model, which stays asleep; its server has metrics of its own.
    (r"is_sleeping\(server\) == False$", "is_sleeping(server) in (True, False)"),
    (
        r"fetch_metrics\(server\) == metrics_awake$",
        'all(s in metrics_awake for s in fetch_metrics(server).splitlines() if "llamacpp:" in s)',
    ),
)


class Output(NamedTuple):
    """What a command wrote."""

    stdout: str
    stderr: str


class Outcome(NamedTuple):
    """The outcome of a test: file and name, passed, failed or left out, and the reason."""

    file: str
    name: str
    state: str
    why: str


def fetched() -> Path:
    """The unpacked source distribution, from the user's cache or PyPI."""
    folder = FOLDER / f"llama_cpp_python-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as there:
            pip = [sys.executable, "-P", "-m", "pip", "download", "-q", "--no-deps", "-d", there]
            name = f"llama-cpp-python=={VERSION}"
            subprocess.run([*pip, "--no-binary", ":all:", name], check=True)
            (archive,) = Path(there).glob("*.tar.gz")
            shutil.unpack_archive(archive, there, filter="data")
            (Path(there) / folder.name).rename(folder)
    return folder


def reason(file: str, name: str) -> str | None:
    """The reason why a test is left out; None: it is run."""
    for pattern, why in LEFT_OUT.items():
        of_file, _, of_name = pattern.partition("::")
        if file == of_file and fnmatch(name, of_name or "*"):
            return why
    return None


def adjusted(source: Path, target: Path) -> None:
    """Copy a suite and replace its token counts."""
    shutil.copytree(source, target)
    (target / "tmp").mkdir(exist_ok=True)  # in which its tests write
    for path in target.glob("unit/*.py"):
        lines = path.read_text().split("\n")
        for pattern, instead in COUNTS:
            lines = [re.sub(pattern, instead, line) for line in lines]
        path.write_text("\n".join(lines))


def collected(suite: Path, files: Iterable[str]) -> tuple[dict[str, list[str]], list[Outcome]]:
    """The names of all tests that are not marked slow, by file; files that cannot be read."""
    found: dict[str, list[str]] = {}
    events = suite / "collected.jsonl"
    done = _pytest(suite, ["--collect-only", *files], events)
    for line in done.stdout.splitlines():
        path, _, name = line.partition("::")
        if name and path.endswith(".py"):
            found.setdefault(Path(path).name, []).append(name)
    bad = [
        Outcome(Path(file).name, "all", "failed", f"cannot be read: {why}")
        for file, part, _, why in _events(events)
        if part == "collected"
    ]
    if not found and not bad:
        raise SystemExit(f"no tests were found:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found, bad


def _pytest(suite: Path, arguments: Iterable[str], events: Path) -> Output:
    server = suite / "llama-server"
    if not server.exists():
        server.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -P -m tamis.tools.peer_server "$@"\n'
        )
        server.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as free:  # another server may have the usual port
        port = str(free.getsockname()[1])
    own = {"LLAMA_SERVER_BIN_PATH": str(server), "PORT": port}
    own["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    flags = ["-q", "-m", "not slow", "-p", "tamis.tools.peer_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-P", "-m", "pytest", *flags, "-o", "addopts=", *arguments]
    return finished(command, suite, os.environ | own | {EVENTS: str(events)}, FILE_SECONDS)


def finished(
    command: list[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> Output:
    """Run a command and return what it wrote; then nothing that it started runs any more.

    Raises subprocess.TimeoutExpired after ``seconds``.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        finally:  # a server that a test started holds its pipes and its port
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return Output(out, err)


def outcomes(suite: Path, file: str, names: list[str]) -> list[Outcome]:
    """Run the tests of a file, except those that are left out."""
    left_out = {name: why for name in names if (why := reason(file, name)) is not None}
    found = [Outcome(file, name, "left out", why) for name, why in left_out.items()]
    wanted = [name for name in names if name not in left_out]
    if wanted:
        events = suite / f"{file}.jsonl"
        ids = [f"{'unit/' if (suite / 'unit').exists() else ''}{file}::{name}" for name in wanted]
        try:
            done = _pytest(suite, ids, events)
            stopped = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["nothing was said"]
            end = f"pytest ended with {stopped[0][:160]}"
        except subprocess.TimeoutExpired:
            end = f"the file's {FILE_SECONDS} s were over"
        states = states_of(_events(events), end)
        never = ("failed", f"not begun: {end}")
        found += [Outcome(file, name, *states.get(name, never)) for name in wanted]
    return found


def _events(path: Path) -> list[list[str]]:
    """What the plugin wrote: test or file, part, outcome, why."""
    if not path.exists():  # pytest could not begin
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def states_of(events: Iterable[list[str]], end: str) -> dict[str, tuple[str, str]]:
    """The state of each test that has begun by its name, and why it is not passed.

    end: why the run was over.
    """
    found: dict[str, tuple[str, str]] = {}
    for nodeid, part, outcome, why in events:
        name = nodeid.partition("::")[2]
        if part == "begun":
            found[name] = ("failed", f"has begun and not ended: {end}")
        elif outcome == "failed" and "LocalEntryNotFoundError" in why:
            found[name] = ("left out", OUT_OF_REACH)
        elif outcome == "failed":
            found[name] = ("failed", why)
        elif outcome == "skipped":
            found[name] = ("left out", why or "skipped by itself")
        elif part == "call":
            found[name] = ("passed", "")
    return found


def report_of(found: list[Outcome]) -> str:
    """The table by file, the reasons of tests left out, and the failures."""
    rows = ["| file | tests | pass | fail | left out |", "|---|---|---|---|---|"]
    files = sorted({each.file for each in found})
    for name, some in [(f, [o for o in found if o.file == f]) for f in files] + [("all", found)]:
        n = {
            state: sum(o.state == state for o in some) for state in ("passed", "failed", "left out")
        }
        counts = f"{n['passed']} | {n['failed']} | {n['left out']}"
        rows.append(f"| `{name}` | {len(some)} | {counts} |")
    why: dict[str, int] = {}
    for each in found:
        if each.state == "left out":
            why[each.why] = why.get(each.why, 0) + 1
    rows += ["", "Left out:", *(f"- {n}: {text}" for text, n in why.items()), "", "Failed:"]
    rows += [f"- `{o.file}::{o.name}`: {o.why}" for o in found if o.state == "failed"]
    return "\n".join(rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("suite", choices=["llama-server", "llama-cpp-python"])
    parser.add_argument("files", nargs="*", help="some files of the suite; default: all")
    parser.add_argument("--source", type=Path, help="an unpacked source distribution")
    arguments = parser.parse_intermixed_args()
    source = arguments.source or fetched()
    with tempfile.TemporaryDirectory() as there:
        suite = Path(there) / "tools/server/tests"  # as deep as it is beside its templates
        (Path(there) / "models").symlink_to(source / "vendor/llama.cpp/models")
        if arguments.suite == "llama-server":
            adjusted(source / SERVER_TESTS, suite)
            wanted = [f"unit/{file}" for file in arguments.files] or ["unit"]
        else:
            suite = _python_suite(source, suite)
            own = sorted(path.name for path in suite.glob("test_*.py"))  # not those of vendor
            wanted = arguments.files or own
        names, found = collected(suite, wanted)
        for file, tests in sorted(names.items()):
            found += outcomes(suite, file, tests)
            n = sum(o.state == "passed" for o in found)
            sys.stderr.write(f"{file}: {n} of {len(found)} so far\n")
    print(report_of(found))
    print(json.dumps({"suite": arguments.suite, "version": VERSION, "outcomes": found}))


def _python_suite(source: Path, suite: Path) -> Path:
    """The tests of llama-cpp-python, with the vocabularies that they read, on our llama_cpp."""
    shutil.copytree(source / "tests", suite)
    (suite / "vendor").symlink_to(source / "vendor")
    import tamis.bindings

    module = Path(tamis.bindings.__path__[0]) / "tamis_llama_cpp"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(module), os.environ.get("PYTHONPATH", "")])
    return suite


if __name__ == "__main__":
    main()
