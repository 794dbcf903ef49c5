"""The fuzz targets: a function of bytes for each reader of foreign data, and its seeds.

A target returns or raises one of the errors that its reader documents; anything else, a wrong
result (AssertionError) or the end of the process, is a finding. They need no fuzzer: see fuzz.py
and tests/fuzz.
"""

import contextlib
import dataclasses
import functools
import json
import random
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tamis.arch.load import ArchError
from tamis.bindings.drop_in.caches import LlamaDiskCache, LlamaState
from tamis.engine import session_file
from tamis.engine.engine import Engine
from tamis.engine.session import SessionFileError
from tamis.formats.dequant import dequantize
from tamis.formats.documents import DocumentError, html_text, read_document
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.formats.vocab import Vocab
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.compile.workers import CompileError, Progress
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.kv.unit_file import KVFile, KVFileError, Units
from tamis.platform.private_files import write_whole
from tamis.sampling.base import SamplerError
from tamis.sampling.grammar import Grammar, gbnf_grammar, json_grammar
from tamis.sampling.vocabulary import Bytes, GrammarTokenizer
from tamis.select.base import DECODE, PREFILL, SelectorShape
from tamis.select.notation import methods, parse_method
from tamis.summary import cache as summary_cache
from tamis.summary.cache import Cache, key_of
from tamis.summary.reader import Answer
from tamis.text.calls.format import FLAT, Argument, ToolFormat
from tamis.text.calls.readers import CODER
from tamis.text.chat_format import ChatFormat
from tamis.text.chat_template import ChatTemplate, PromptError
from tamis.text.tokenizer import TokenizerError
from tamis.text.tool_calls import OutputParser, message_of
from tamis.tools import fuzz_files
from tamis.tools.fuzz_model import METHODS, SHAPE, engine, folder, model, two_tokens

MODEL = b"MODEL"  # in a seed of a session: stands for the session's model
MAX_TENSOR = 1 << 20  # elements of a tensor that are dequantized
FOLLOWED = 12  # tokens of a text that follows a grammar
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEXTS = ["", "Hello world", "x" * 99, "é日本 \U0001f600\n\t", "<|im_start|>user\n"]
MESSAGES = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": ""}]


class OnlyCompiled(KernelLibrary):
    """Refuses, at once, files that ask for kernels which are not compiled."""

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Raise CompileError if one is missing."""
        if missing := self.missing(specs := list(specs)):
            raise CompileError(f"{missing[0].symbol} is not compiled")
        super().load(specs, progress)


CALL_TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"properties": properties}}}
    for properties in ({"a": {"type": "string"}, "n": {"type": "integer"}},)
]
_MARKS = ("<tool_call>",), ("</tool_call>",), ("<tool_call>",)
_KEYS = Argument("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>")
CALL_FORMATS = [
    ToolFormat("json", *_MARKS, fields=FLAT),
    CODER,
    ToolFormat(
        "tagged",
        *_MARKS,
        argument=Argument("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
    ),
    ToolFormat("tag", ("<s>", "<c>", "f", "<p>"), ("```", "<e>", "</s>"), ("<s>", "<c>", "<p>")),
    ToolFormat(
        "python", ("<|tool_call_start|>",), ("<|tool_call_end|>",), ("<|tool_call_start|>",)
    ),
    ToolFormat("gemma", ("<|tool_call>", "call:"), ("<tool_call|>",), ("<|tool_call>",)),
    ToolFormat("json", fields=FLAT),
    ToolFormat(
        "elements",
        ("~<c>", '~<i n="'),
        ("~</i>", "~</c>"),
        ("~<c>", '~<i n="'),
        middle=('">',),
        argument=Argument("~"),
    ),
    ToolFormat(
        "xtml",
        ("<o>calls<s>", "<o>call"),
        ("<c>call<s>", "<c>calls<s>"),
        ("<o>calls<s>", "<o>call"),
        middle=("<o>json",),
        argument=Argument("<o>argument", closing="<c>argument<s>", kind_end="<s>"),
    ),
    ToolFormat("harmony"),
    ToolFormat("recipient"),
]


def gguf(data: bytes) -> None:
    """A model file: opened, read, loaded, and two tokens computed."""
    engine()
    path = folder() / "fuzzed.gguf"
    path.write_bytes(data)
    with contextlib.suppress(GGUFError), GGUFFile(path) as file:
        for name, info in file.tensors.items():
            if np.prod(info.shape) < MAX_TENSOR:
                with contextlib.suppress(ValueError):
                    dequantize(file.data(name), info.type, info.shape)
        Vocab.from_gguf(file)
    with contextlib.suppress(
        GGUFError, ArchError, TokenizerError, ValueError, MemoryError, CompileError
    ):
        loaded = Engine.load(path, n_threads=1, library=OnlyCompiled())
        try:
            with contextlib.suppress(PromptError):
                loaded.encode_chat(MESSAGES)
            two_tokens(loaded.session(64, 16))
        finally:
            loaded.close()


def text(data: bytes) -> None:
    """A text: encoded and decoded again."""
    tokenizer = engine().tokenizer
    source = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(TokenizerError, UnicodeEncodeError):
        ids = tokenizer.encode(source)
        assert all(0 <= i < engine().hp.n_vocab for i in ids)
        tokenizer.decode(ids)


def template(data: bytes) -> None:
    """A chat template, and after a zero byte a message."""
    source, _, message = data.partition(b"\0")
    content = message.decode("utf-8", "replace")
    messages = [*MESSAGES, {"role": "user", "content": content}]
    with contextlib.suppress(PromptError):
        made = ChatTemplate(source.decode("utf-8", "replace"), "<s>", "</s>")
        made.render(messages)
        made.render_parts(messages)


def gbnf(data: bytes) -> None:
    """A GBNF grammar, and a text that follows it."""
    with contextlib.suppress(SamplerError):
        _follow(gbnf_grammar(data.decode("utf-8", "replace")), data)


def regex(data: bytes) -> None:
    """A regular expression of a JSON schema, and a text that follows it."""
    pattern = data.decode("utf-8", "replace")
    with contextlib.suppress(SamplerError):
        _follow(json_grammar({"type": "string", "pattern": pattern}), data)


def schema(data: bytes) -> None:
    """A JSON schema, and a text that follows it."""
    with contextlib.suppress(SamplerError, ValueError, RecursionError):
        _follow(json_grammar(json.loads(data)), data)


def _follow(grammar: str, data: bytes) -> None:
    """Follow a grammar for some tokens chosen by the data; it must accept what it allowed."""
    followed, choices = Grammar(grammar, grammars()), random.Random(data)
    for _ in range(FOLLOWED):
        mask = np.unpackbits(np.frombuffer(followed.mask(), np.uint8), bitorder="little")
        if not len(allowed := np.flatnonzero(mask[:256])):
            return
        try:
            followed.accept(int(choices.choice(allowed)))
        except SamplerError as error:  # it may outgrow its limits here
            if "does not allow" in str(error):
                raise AssertionError(str(error)) from error
            return


def calls(data: bytes) -> None:
    """An answer with tool calls: a byte for its format, one for its pieces, and the text."""
    style, step = data[:1], (data[1:2] or b"\0")[0] % 9 + 1
    source = data[2:].decode("utf-8", "replace")
    format = ChatFormat(("<think>", "</think>"), tools=CALL_FORMATS[sum(style) % len(CALL_FORMATS)])
    found = []
    for n in (step, max(1, len(source))):
        parser = OutputParser(format, tools=CALL_TOOLS, new_id=lambda: "id")
        deltas = [d for i in range(0, len(source), n) for d in parser.push(source[i : i + n])]
        found.append(message_of([*deltas, *parser.finish(cut=bool(sum(style) & 128))]))
    assert found[0] == found[1], "an answer depends on its pieces"
    for call in found[0].get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"], parse_int=str), dict)
        assert 0 < len(call["function"]["name"]) <= 256


@functools.cache
def grammars() -> GrammarTokenizer:
    """The vocabulary of grammars; imports what compiles them."""
    return GrammarTokenizer(Bytes(), Bytes.n_vocab)


def session(data: bytes) -> None:
    """A session file with right checksums: a header, a zero byte, and the arrays' bytes."""
    text_, _, rows = data.partition(b"\0")
    path = folder() / "session"
    path.write_bytes(data)
    with contextlib.suppress(SessionFileError):
        session_file.SessionFile(path).__exit__()
    try:
        header = json.loads(text_.replace(MODEL, engine().session(64)._fingerprint().encode()))
    except (ValueError, RecursionError):
        return
    half = len(rows) // 2
    arrays = [np.frombuffer(part, np.uint8) for part in (rows[:half], rows[half:])]
    session_file.write(path, header, arrays)
    for attn in METHODS:
        found = engine().session(64, 16, attn)
        found.prefill([3, 4])
        try:
            found.load(path)
        except ValueError:
            assert found.tokens == [3, 4]
        if found.n_past < 64:
            found.decode(5)


def cache(data: bytes) -> None:
    """A file of LlamaDiskCache, and an answer of the summaries' cache."""
    own = folder() / "cache"
    states = LlamaDiskCache(str(own))
    for path in own.iterdir():
        path.unlink()
    with write_whole(own / "a.npz", durable=False) as file:
        file.write(data)
    with contextlib.suppress(KeyError):
        assert isinstance(states[[1, 2, 3]], LlamaState)
    answers, key, text = Cache(own), key_of("a"), data.decode(errors="replace")
    right = f"{summary_cache._digest(key, text)}\n{text}"  # the digest of the data that follows
    for content in (data, right.encode()):
        with write_whole(own / f"{key}.json", durable=False) as file:
            file.write(content)
        answers.get(key, Answer)


def kv(data: bytes) -> None:
    """A KV file, overwritten: the data equals what was written, or an error is raised."""
    units, rows = _units()
    file = units._file
    file.write(0, [rows.reshape(-1).data])
    if data:
        file.write(data[0] * 8, [memoryview(data[1 : 64 * 32 - data[0] * 8 + 1])])
    memory = np.zeros_like(rows)
    try:
        units.read(np.arange(64), memory, np.arange(64))
    except KVFileError:
        return
    assert np.array_equal(memory, rows)


@functools.cache
def _units() -> tuple[Units, np.ndarray]:
    rows = np.random.default_rng(0).integers(0, 256, (64, 32), np.uint8)
    units = Units(KVFile(folder()), 0, 64, 32)
    units.write(0, [rows])
    return units, rows


def html(data: bytes) -> None:
    """A page."""
    html_text(data.decode("utf-8", "replace"))


def document(data: bytes) -> None:
    """A file of any kind, PDFs among them."""
    with contextlib.suppress(DocumentError):
        read_document("file", data)


def http(data: bytes) -> None:
    """The body of a request to any of the server's paths: read and checked, not answered."""
    from tamis.bindings.serve.api.readers import APART, READERS, read
    from tamis.bindings.serve.errors import ApiError
    from tamis.bindings.serve.http.json_reply import JsonReply
    from tamis.bindings.serve.http.router import asked_of
    from tamis.bindings.serve.tasks import Task, from_json, to_json

    reader = _reader()
    with contextlib.suppress(ApiError):
        asked_of(data)
    for name in READERS.keys() - APART:
        try:
            found = read(name, reader, data)
        except ApiError as error:
            found = error.body_for("/")
        if isinstance(found, Task):
            from_json(to_json(found), len(reader.text.vocab))
        else:
            JsonReply(found)


@functools.cache
def _reader() -> Any:
    from tamis.bindings.serve.requests import Limits, Reader
    from tamis.bindings.serve.text import TextModel

    vocab = dataclasses.replace(engine().vocab, chat_template=TEMPLATE)  # the file has none
    model = TextModel(vocab, engine().tokenizer, n_ctx=64)
    return Reader(model, "tiny", Limits(n_ctx=64, n_choices=8))


def attn(data: bytes) -> None:
    """The text of --attn and --prefill."""
    shape = SelectorShape(2, 4, 2, 32, 512, 16, (0, 0))
    for role in (DECODE, PREFILL):
        with contextlib.suppress(ValueError, MemoryError):
            parse_method(data.decode("utf-8", "replace"), role).open(shape)


def _answers() -> list[bytes]:
    """A call in each format, in pieces of three characters."""
    written = [
        '<tool_call>\n{"name": "look", "arguments": {"a": "x}", "n": 1}}\n</tool_call>',
        "<tool_call>\n<function=look>\n<parameter=a>\n</parameter>\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>look<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
        'a<s><c>f<p>look\n```json\n{"a": null}\n```<e></s>',
        "<|tool_call_start|>[look(a='it\\'s', n=[True, {'k': 1.5}])]<|tool_call_end|>",
        '<|tool_call>call:look{a:<|"|>b<|"|>,n:[1,{x:true}]}<tool_call|>',
        '```json\n[{"name": "look", "arguments": {"a": "b"}}]\n```',
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.look <|constrain|>json<|message|>{"a": "b"}<|call|>',
        'all\nHi>>>look\n{"a": "b"}',
    ]
    return [bytes([i, 2]) + text.encode() for i, text in enumerate(written)]


def _seeds() -> dict[str, list[bytes]]:
    """Some valid inputs of each target."""
    rows = b"\1\2" * (2 * 2 * SHAPE.n_head_kv * SHAPE.head_dim * SHAPE.n_layer)
    header = {"model": MODEL.decode(), "tokens": [3, 4], "kv": ["f16", "f16"]}
    body = {"model": "x", "messages": MESSAGES, "max_tokens": 3, "temperature": 0.5, "stop": ["a"]}
    page = b"<!doctype html><title>t</title><h1>a</h1><p>b<ul><li>c</ul><pre>d</pre><!-- e -->"
    names = [f"{name}(window)" if "inner" in _fields(m) else name for name, m in methods().items()]
    return {
        "gguf": [model().read_bytes()],
        "text": [t.encode() for t in TEXTS],
        "template": [
            b"{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\0Hi",
            b"{% macro f(x) %}{{ x }}{% endmacro %}{{ f(messages[0].content) }}{% set a = 1 %}",
            b"{{ messages | map(attribute='role') | join(',') | upper }}\0\xff",
        ],
        "gbnf": [b'root ::= "a" | b*\nb ::= [a-z0-9]+ ("x" | "y")?', b'root ::= [^"\\\\]{2,5}'],
        "regex": [b"^[a-z]+(\\d{2,3}|x?)$", b"(?:a|b)*c", b"\\w+@\\w+"],
        "schema": [
            b'{"type":"object","properties":{"a":{"type":"integer","minimum":1}},"required":["a"]}',
            b'{"anyOf":[{"enum":["a","b"]},{"type":"array","items":{"type":"number"}}]}',
            b'{"$ref":"#/$defs/a","$defs":{"a":{"type":"string","maxLength":5}}}',
        ],
        "session": [json.dumps(header).encode() + b"\0" + rows],
        "cache": [_npz(), json.dumps(dataclasses.asdict(Answer("a", "stop", 3, 2, 1))).encode()],
        "kv": [b"", b"\0" + bytes(9), b"\7abc"],
        "html": [page, b"<![CDATA[x]]><![if x]><?php ?><a b='c", b"&amp;&#x41;&#999999999;<p"],
        "document": [page, b"# a\n\ntext", b"%PDF-1.4\n", _pdf()],
        "http": [
            json.dumps(body).encode(),
            json.dumps({"prompt": ["a", [1, 2]], "n": 2, "logprobs": 1, "seed": 1}).encode(),
            json.dumps(body | {"response_format": {"type": "json_object"}, "n": 2}).encode(),
            json.dumps({"query": "a", "documents": ["b"], "keep_alive": "1h3m"}).encode(),
            json.dumps({"input": "\ud800", "content": "x", "options": {"stop": ["a"]}}).encode(),
            json.dumps({"system": [{"type": "text", "text": "s"}], **body, "tools": []}).encode(),
        ],
        "calls": _answers(),
        "attn": [name.encode() for name in names] + [b"tactic:P=0.9,c=16", b"lfps@0-0+topk:k=9@1"],
    }


def _fields(method: Any) -> Any:
    return method.__dataclass_fields__


def _npz() -> bytes:
    own = folder() / "seed"
    states = LlamaDiskCache(str(own))
    ids, scores = np.arange(3, dtype=np.int32), np.zeros((0, 9), np.float32)
    states[[1, 2, 3]] = LlamaState(ids, scores, 3, b"abc", 3, 7)
    (path,) = own.iterdir()
    data = path.read_bytes()
    assert zipfile.is_zipfile(path)
    return data


def _pdf() -> bytes:
    """A page with a text, the smallest that pypdf reads; its table of objects is missing."""
    stream = b"BT /F1 12 Tf 9 9 Td (Hello) Tj ET"
    return (
        b"%%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
        b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>endobj\n"
        b"4 0 obj<</Length %d>>stream\n%s\nendstream endobj\n"
        b"5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\n"
        b"trailer<</Root 1 0 R>>\n%%%%EOF" % (len(stream), stream)
    )


TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f
    for f in (
        gguf, text, template, gbnf, regex, schema, session, cache, kv, html, document, http, attn,
        calls,
    )
}  # fmt: skip


TARGETS |= fuzz_files.TARGETS


@functools.cache
def seeds(name: str) -> list[bytes]:
    """Valid inputs of a target, the same ones every time."""
    return fuzz_files.SEEDS[name]() if name in fuzz_files.SEEDS else _seeds()[name]
