"""Further fuzz targets: files beside a model, answers of a batch, the page.

A target returns or raises one of the errors that its reader documents; see fuzz_targets.
"""

import contextlib
import functools
import io
import json
import random
import struct
import threading
from collections.abc import Callable

import numpy as np

from tamis.bindings.serve.offline import Answers, BatchError, items
from tamis.engine.adapters import AdapterError, AdapterFiles
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.jit_kernels.compile.shipped import Shipped, ShippedError, write_shipped
from tamis.model.prepared import Checking, Prepared
from tamis.text.chat_template import ChatTemplate, PromptError
from tamis.tools.fuzz_model import SHAPE, engine, folder, model
from tamis.tools.page_markdown import PageMarkdown, available, shown

SPANS = [(0, 5000), (5056, 9000)]  # of prepared matrices
SLOW_PAGE = 2.0  # of processor time for a text of up to 300 KB
JINJA = [
    "loop.changed(m)",
    "loop.cycle('a','b')",
    "loop.depth0",
    "loop.previtem",
    "loop.nextitem",
    "loop(m)",
    "namespace(a=1)",
    "caller()",
    "varargs",
    "kwargs",
    "self",
    "super()",
    "range(9)",
    "lipsum()",
    "cycler('a')",
    "joiner(',')",
    "dict(a=1)",
    "m|groupby('role')",
    "m|batch(2)",
    "m|slice(2)",
    "m|tojson",
    "m|xmlattr",
    "m|wordwrap(3)",
    "m|urlize",
    "m|striptags",
    "m|title",
    "m|indent(2)",
    "m|replace('a','b')",
    "m|format",
    "m|round",
    "m|sum",
    "m|unique",
    "m|map('upper')",
    "m|select",
    "m|rejectattr('role')",
    "m|sort",
    "m|min",
    "m|center(9)",
    "m|truncate(3)",
    "m|escape",
    "m|int",
    "m|attr('role')",
    "m",
    "is",
    "sameas",
    "m|dictsort",
    "m|pprint",
    "m|random",
    "m|filesizeformat",
    "m|urlencode",
    "m|items",
    "m|last",
]
TAGS = (
    "{%% for a in m recursive %%}%s{%% else %%}b{%% endfor %%}",
    "{%% macro f(a, b=1) %%}%s{%% endmacro %%}{{ f(m, *m, **m) }}",
    "{%% call(x) f(m) %%}%s{%% endcall %%}",
    "{%% filter upper %%}%s{%% endfilter %%}",
    "{%% set ns.a %%}%s{%% endset %%}",
    "{%% with a = m %%}%s{%% endwith %%}",
    "{%% if m is defined and m in m %%}%s{%% elif m is mapping %%}b{%% endif %%}",
    "{%% block b scoped %%}%s{%% endblock %%}{%% include 'x' %%}{%% import 'x' as y %%}",
    "{%% autoescape true %%}%s{%% endautoescape %%}{%% do m.append(1) %%}",
    "{%% for a in m %%}%s{%% break %%}{%% continue %%}{%% endfor %%}{%% debug %%}",
    "{%% raw %%}%s{%% endraw %%}{# %s #}{%%- trans -%%}x{%%- endtrans -%%}",
)


def adapter(data: bytes) -> None:
    """A LoRA adapter, and a session of the model with it."""
    path = folder() / "lora.gguf"
    path.write_bytes(data)
    with contextlib.suppress(GGUFError, AdapterError, ValueError, MemoryError):
        found = AdapterFiles(loras=((str(path), 1.0),)).load()
        session = engine().session(64, 16, adapters=found)
        session.prefill([3, 4])


def control(data: bytes) -> None:
    """A control vector, and a session of the model with it."""
    path = folder() / "control.gguf"
    path.write_bytes(data)
    with contextlib.suppress(GGUFError, AdapterError, ValueError, MemoryError):
        found = AdapterFiles(control=((str(path), 1.0),)).load()
        session = engine().session(64, 16, adapters=found)
        session.prefill([3, 4])


def prepared(data: bytes) -> None:
    """Prepared weights, overwritten: data is unchanged, or is reported as damaged."""
    file, whole = _prepared()
    file.path.write_bytes(whole)
    file.path.chmod(0o600)
    if data:
        at = int.from_bytes(data[:3], "little") % len(whole)
        part = data[3:]
        file.path.write_bytes(whole[:at] + part + whole[at + len(part) :])
    mapped = file.map()
    if mapped is None:
        return
    try:
        check = Checking(file)
        check.check(thorough=True)
    except (GGUFError, OSError):
        assert not file.path.exists()
        return
    assert np.array_equal(mapped, _strips()), "damage was not found"


@functools.cache
def _prepared() -> tuple[Prepared, bytes]:
    own = folder() / "prepared"
    own.mkdir(mode=0o700, exist_ok=True)
    file = Prepared.of(own, b"a", SPANS, 1 << 30, "m.gguf")
    assert file.write(_memory(), threading.Event())
    return file, file.path.read_bytes()


def _memory() -> np.ndarray:
    from tamis.platform.memory import huge_zeros

    strips = _strips()
    _, memory = huge_zeros(strips.shape, strips.dtype)
    memory[:] = strips
    return memory


def _strips() -> np.ndarray:
    n_bytes = max(start + size for start, size in SPANS)
    return np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)


def batch(data: bytes) -> None:
    """A file of requests, and one of answers.

    Each is refused unchanged, or loses only its own last line.
    """
    list(items(io.BytesIO(data)))
    path = folder() / "answers"
    for retry in (False, True):
        path.write_bytes(data)
        try:
            answers = Answers(path, retry_failed=retry)
        except BatchError:
            assert path.read_bytes() == data
            continue
        answers.close()
        if not retry:
            left = path.read_bytes()
            cut = data[len(left) :]
            assert left[:-1] == data or data.startswith(left)
            assert b"\n" not in cut
            assert not cut or b'{"id": "batch_req_'.startswith(cut[:18])


def page(data: bytes) -> None:
    """An answer on the page: no error, no lost words, no long time."""
    text = data.decode("utf-8", "replace")
    tree, seconds = _page().read(text)
    assert seconds < SLOW_PAGE, f"{seconds} s"
    words = "".join(c for c in shown(tree) if c.isalpha())
    assert len(words) <= sum(c.isalpha() for c in text)


@functools.cache
def _page() -> PageMarkdown:
    return PageMarkdown()


def shipped(data: bytes) -> None:
    """Kernels of a release, tampered with: the right bytes or an error."""
    code, whole = _code()
    path = folder() / "kernels"
    at = int.from_bytes(data[:3], "little") % len(whole)
    part = data[3:]
    path.write_bytes(whole[:at] + part + whole[at + len(part) :] if data else whole)
    try:
        found = Shipped(path)
        for symbol in code:
            read = found.read(symbol)
            assert read is None or read == code[symbol] or part == b""
    except (ShippedError, OSError):
        return


@functools.cache
def _code() -> tuple[dict[str, bytes], bytes]:
    path, source = folder() / "whole", random.Random(0)
    code = {f"k{i}": source.randbytes(40 * i + 1) * 3 for i in range(40)}
    write_shipped(path, code, sources="s", compiler="c", block=4096)
    return code, path.read_bytes()


def jinja(data: bytes) -> None:
    """A template of rarely used features, combined by the data."""
    source = random.Random(data)
    parts = []
    for _ in range(source.randint(1, 4)):
        inner = "".join(f"{{{{ {source.choice(JINJA)} }}}}" for _ in range(source.randint(1, 3)))
        tag = source.choice(TAGS)
        parts.append(tag % ((inner,) * tag.count("%s")))
    text = "".join(parts) + data.decode("utf-8", "replace")[:200]
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    with contextlib.suppress(PromptError):
        made = ChatTemplate("{% set m = messages %}" + text, "<s>", "</s>")
        made.render(messages)


def _gguf(metadata: dict[str, str | float], tensors: dict[str, np.ndarray]) -> bytes:
    """A GGUF file of float32 tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        text = isinstance(value, str)
        head += string(key) + (struct.pack("<I", 8) + string(str(value)) if text else b"")
        head += b"" if text else struct.pack("<If", 6, value)
    at = 0
    for name, array in tensors.items():
        head += string(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}QIQ", *array.shape[::-1], 0, at)
        at += -(-array.nbytes // 32) * 32
    data = head + bytes(-len(head) % 32)
    for array in tensors.values():
        data += array.tobytes() + bytes(-array.nbytes % 32)
    return data


def _adapter_seed() -> bytes:
    with GGUFFile(model()) as file:
        info = file.tensors["blk.0.attn_q.weight"]
        arch = str(file.metadata["general.architecture"])
    n_in, n_out = info.shape
    a, b = np.ones((2, n_in), "f4"), np.ones((n_out, 2), "f4")
    names = {f"blk.0.attn_q.weight.lora_{half}": array for half, array in (("a", a), ("b", b))}
    told: dict[str, str | float] = {"general.type": "adapter", "adapter.type": "lora"}
    return _gguf(told | {"general.architecture": arch, "adapter.lora.alpha": 4.0}, names)


def _control_seed() -> bytes:
    rows = {"direction.1": np.ones(SHAPE.n_embd, "f4")}
    return _gguf({"general.architecture": "controlvector"}, rows)


def _batch_seed() -> bytes:
    good = {"status_code": 200, "request_id": "r", "body": {}}
    answer = {"id": "batch_req_1", "custom_id": "a", "response": good, "error": None}
    asked = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return b"\n".join(json.dumps(each).encode() for each in (answer, asked)) + b"\n"


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "adapter": lambda: [_adapter_seed()],
    "control": lambda: [_control_seed()],
    "prepared": lambda: [b"", b"\0\0\0x", b"\x40\x10\0" + bytes(9), b"\x00\x20\0abc"],
    "batch": lambda: [_batch_seed(), _batch_seed()[:90], _batch_seed().splitlines()[0], b"a text"],
    "page": lambda: [
        b"# a\n\n- b **c** `d`\n  1. e\n\n> f\n\n|g|h|\n|-|-|\n|i|[j](http://k)|\n```\nl\n```",
        b"**a *b* [c](https://d) ``e``",
        b">>> a\n> b\n***\n~~~\nx",
    ],
    "shipped": lambda: [b"", b"\0\0\0x", b"\x10\x01\0" + bytes(40)],
    "jinja": lambda: [b"", b"a", b"{{ m }}", b"{% for a in m %}{{ a }}{% endfor %}"],
}
TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f for f in (adapter, control, prepared, batch, shipped, jinja)
}
if available():  # of node
    TARGETS["page"] = page
