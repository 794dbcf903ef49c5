"""What people reported of other programs, without a server: each test names the report.

`serve/test_serve_reports.py` has the reports about servers.
"""

import itertools
import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
from gguf_files import gguf_bytes, kv, tensor, text, u32, write_bytes
from grammars import fits, matcher
from tiny_models import byte_alphabet
from vocabularies import make_vocab

from tamis import Engine, Llama
from tamis.bindings.drop_in.drafting import LlamaPromptLookupDecoding
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.formats.vocab import TokenType
from tamis.sampling.grammar import gbnf_grammar, json_grammar
from tamis.text.chat_template import ChatTemplate
from tamis.text.tokenizer import tokenizer_for
from tamis.text.tool_calls import OutputParser, message_of

STRING, INTEGER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


# --- Calls of tools ----------------------------------------------------------------------------


def template(calls, turn="<|im_start|>assistant\n", end="<|im_end|>\n"):
    """A chat template whose assistant's turns write calls in the form given."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + turn + "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}" + calls + "{% endfor %}" + end + "{% else %}"
        "<|{{ m.role }}|>{{ m.content }}" + end + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + turn + "{% endif %}"
    )


def arguments(each):
    """The loop over a call's arguments in a template."""
    return "{% for k, v in c.function.arguments.items() %}" + each + "{% endfor %}"


NAME = "{{ c.function.name }}"
JSON = "{{ c.function.arguments | tojson }}"
AS_TEXT = "{{ v if v is string else v | tojson }}"
ELEMENTS = template(
    "\n<tool_call>\n<function=" + NAME + ">\n"
    + arguments("<parameter={{ k }}>\n{{ v | string }}\n</parameter>\n")
    + "</function>\n</tool_call>"
)  # fmt: skip
OBJECTS = template(
    '\n<tool_call>\n{"name": "' + NAME + '", "arguments": ' + JSON + "}\n</tool_call>"
)
PAIR = "<arg_key>{{ k }}</arg_key><arg_value>" + AS_TEXT + "</arg_value>"
PAIRS = template("<tool_call>" + NAME + arguments(PAIR) + "</tool_call>", "<|assistant|>", "")
PAIR_OF_LINES = "<arg_key>{{ k }}</arg_key>\n<arg_value>" + AS_TEXT + "</arg_value>\n"
PAIRS_OF_LINES = template(
    "\n<tool_call>" + NAME + "\n" + arguments(PAIR_OF_LINES) + "</tool_call>", "<|assistant|>\n", ""
)
IDS = template(
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + JSON
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|im_end|>",
)
LIST_ONLY = (
    "{% if tools %}<|im_start|>system\nList of tools: [{% for t in tools %}{{ t | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINES = "<tool_call>put\n<arg_key>into</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>line"
LINES += "</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
PUT = {"into": STRING, "line": INTEGER}
CALLS = [
    pytest.param(  # PrimeIntellect-ai/renderers#47
        ELEMENTS,
        "<tool_call>\n<function=sync>\n<parameter=name>\nFalse\n</parameter>\n<parameter=dry>\n"
        "True\n</parameter>\n<parameter=n>\n4\n</parameter>\n</function>\n</tool_call>",
        {"sync": {"name": STRING, "dry": FLAG, "n": INTEGER}},
        [("sync", {"name": "False", "dry": True, "n": 4})],
        "",
        id="flags-as-python-writes-them",
    ),
    pytest.param(  # antoinezambelli/forge#55, ggml-org/llama.cpp#16932
        ELEMENTS,
        'Let me look.\n<function=sh>\n<parameter=line>\nawk "{print  $2}" f\n</parameter>\n'
        "</function>\n</tool_call>",
        {"sh": {"line": STRING}},
        [("sh", {"line": 'awk "{print  $2}" f'})],
        "Let me look.",
        id="no-mark-before-the-function",
    ),
    pytest.param(  # ggml-org/llama.cpp#17155 and #17376
        IDS,
        "Wait.<|tool_calls_section_begin|><|tool_call_begin|>functions.read:3"
        '<|tool_call_argument_begin|>{"at": "x"}<|tool_call_end|><|tool_call_begin|>functions.now:4'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        {"read": {"at": STRING}, "now": {}},
        [("read", {"at": "x"}), ("now", {})],
        "Wait.",
        id="a-template-that-writes-ids-alone",
    ),
    pytest.param(  # ggml-org/llama.cpp#23838, lmstudio-bug-tracker#1979
        LIST_ONLY,
        "<|tool_call_start|>[seek(words='tea in Kyoto', most=2)]<|tool_call_end|>",
        {"seek": {"words": STRING, "most": INTEGER}},
        [("seek", {"words": "tea in Kyoto", "most": 2})],
        "",
        id="a-template-that-lists-tools-alone",
    ),
    pytest.param(  # vllm-project/vllm#49248
        PAIRS,
        "<tool_call>ask<arg_key>what</arg_key>the way home</arg_value></tool_call>",
        {"ask": {"what": STRING}},
        [("ask", {"what": "the way home"})],
        "",
        id="a-value-without-its-first-mark",
    ),
    # vllm-project/vllm#54971, Blaizzy/mlx-vlm#2207
    *(
        pytest.param(of, LINES.replace("\n", between), {"put": PUT},
                     [("put", {"into": "a b", "line": 7})], "", id=f"white-space-{i}")
        for i, (of, between) in enumerate(itertools.product((PAIRS, PAIRS_OF_LINES), ("", "\n")))
    ),
    pytest.param(  # vllm-project/vllm#21544
        OBJECTS,
        '<tool_call>\n{"name": "sh", "arguments": {"line": "touch {a,{b1,b2"}}\n</tool_call>',
        {"sh": {"line": STRING}},
        [("sh", {"line": "touch {a,{b1,b2"})],
        "",
        id="braces-that-stay-open",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("of", "answer", "tools", "calls", "content"), CALLS)
@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
def test_a_call_is_found_with_its_arguments(of, answer, tools, calls, content, step):
    given = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        for name, properties in tools.items()
    ]
    ids = iter(map(str, range(9)))
    parser = OutputParser.for_template(ChatTemplate(of), tools=given, new_id=ids.__next__)
    deltas = [d for i in range(0, len(answer), step) for d in parser.push(answer[i : i + step])]
    message = message_of(deltas + parser.finish())
    functions = [call["function"] for call in message["tool_calls"]]
    found = [(function["name"], json.loads(function["arguments"])) for function in functions]
    assert repr(found) == repr(calls)  # True is not 1
    assert (message["content"] or "") == content


# --- Schemas and grammars ----------------------------------------------------------------------


def thing(**properties):
    """The schema of an object with these properties, all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


PARTS = {"$defs": {"P": thing(p=INTEGER), "Q": thing(q=STRING)}}
OF_P, OF_Q = {"$ref": "#/$defs/P"}, {"$ref": "#/$defs/Q"}
INTO_ARRAY = thing(x={"anyOf": [STRING, thing(y={"$ref": "#/properties/x/anyOf/0"})]})
SCHEMAS = [  # ggml-org/llama.cpp#8199, #7703
    ("both-parts", PARTS | {"allOf": [OF_P, OF_Q]}, ['{"p":1,"q":"a"}'], ['{"p":1}', '{"q":"a"}']),
    ("beside", PARTS | thing(r=FLAG) | {"allOf": [OF_P]}, [], ['{"r":true}', '{"p":1}']),
    ("required", thing(a=INTEGER) | {"required": ["a", "b"]}, [], ['{"b":1}', '{"a":1}']),
    # JSON Schema 2020-12, validation, 7.2.1; ruzicka/to-json-schema#13
    *(
        (name, thing(p=STRING | {"format": name}), ['{"p":"x"}'], ['{"p":1}'])
        for name in ("path", "directory-path", "password", "uuid4", "json-string", "hue-of-mine")
    ),
    *(  # that may be enforced
        (name, thing(p=STRING | {"format": name}), [], ['{"p":1}', '{"p":null}'])
        for name in ("binary", "byte", "base64url", "regex", "uri-reference", "iri", "file-path")
    ),
    (  # vercel/ai#9601, noonghunna/club-3090#45
        "names", {"type": "object", "propertyNames": STRING, "additionalProperties": FLAG},
        ['{"k":true}', "{}"], ['{"k":1}'],
    ),
    (  # ggml-org/llama.cpp#27397
        "slash", STRING | {"pattern": r"^ftp:\/\/(old\.)?host\.net\/\w+$"},
        ['"ftp://host.net/b_2"', '"ftp://old.host.net/c"'], ['"ftp:/host.net/b"', '"ftp://host.net/"'],
    ),
    ("slash-class", STRING | {"pattern": r"^[0-9\/]+$"}, ['"1/2"'], ['"1-2"']),
    # ggml-org/llama.cpp#16714, #27580
    ("digits", STRING | {"pattern": r"^(v-)?\d{2,}$"}, ['"12"', '"v-345"'], ['"1"', '"v-"']),
    ("words", STRING | {"pattern": r"^[\w.]+(\s\w+)?$"}, ['"a.b c"'], ['"a-b"', '"a  b"']),
    # ggml-org/llama.cpp#16790
    ("into-array", INTO_ARRAY, ['{"x":{"y":"s"}}', '{"x":"s"}'], ['{"x":{"y":2}}']),
]  # fmt: skip
GRAMMARS = [  # ggml-org/llama.cpp#2501, #27597, and its grammars/README
    ("u", 'root ::= "\\u00fc"', ["\u00fc"], ["u"]),
    ("U", 'root ::= "\\U0001F680"', ["\U0001f680"], ["x"]),
    (
        "U-class",
        "root ::= [\\U0001F680-\\U0001F6FF]+",
        ["\U0001f680\U0001f6b2"],
        ["x", "\U0001f600"],
    ),
    ("brackets", 'root ::= "\\[" [a-z] "\\]"', ["[q]"], ["q", "\\[q\\]"]),
    ("hyphen", "root ::= [x-z\\-]+", ["x-z"], ["w", "x+"]),
    ("hyphen-not", "root ::= [^\\->]+", ["xz"], ["x-z", ">"]),
]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"), [c[1:] for c in SCHEMAS], ids=[c[0] for c in SCHEMAS]
)
def test_an_ordinary_schema_is_enforced(schema, right, wrong):
    found = matcher(json_grammar(schema))
    assert [each for each in right if not fits(found, each)] == []
    assert [each for each in wrong if fits(found, each)] == []


@pytest.mark.parametrize(
    ("source", "right", "wrong"), [c[1:] for c in GRAMMARS], ids=[c[0] for c in GRAMMARS]
)
def test_escapes_of_gbnf(source, right, wrong):
    found = matcher(gbnf_grammar(source + "\n"))
    assert [each for each in right if not fits(found, each)] == []
    assert [each for each in wrong if fits(found, each)] == []


# --- Llama -------------------------------------------------------------------------------------


def test_drafts_change_no_text(path):
    """ml-explore/mlx-lm#1423, ggml-org/llama.cpp#27975: greedy text with drafts was another."""
    prompts, texts = ["the left hand, the right hand, the left", "one two one two one"], []
    for more in ({}, {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=5)}):
        llm = Llama(str(path), n_ctx=256, verbose=False, **more)
        asked = {"max_tokens": 40, "temperature": 0, "logit_bias": {llm.token_eos(): -100}}
        texts.append([llm(prompt, **asked)["choices"][0]["text"] for prompt in prompts])
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_the_least_answers_of_a_llama(path):
    """abetlen/llama-cpp-python#1468: one token, a stop text at once, bytes, and streams."""
    llm = Llama(str(path), n_ctx=256, verbose=False)
    greedy = {"temperature": 0, "logit_bias": {llm.token_eos(): -100}}
    text, n = "", 0  # the first token or tokens that are a character
    while not text or "\ufffd" in text:
        n += 1
        reply = llm("the hand", max_tokens=n, **greedy)
        text = reply["choices"][0]["text"]
    assert reply["usage"]["completion_tokens"] == n
    assert reply["choices"][0]["finish_reason"] == "length"
    stopped = llm("the hand", max_tokens=8, stop=[text], **greedy)["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    one = llm("the hand", max_tokens=1, logprobs=1, **greedy)
    assert one["usage"]["completion_tokens"] == 1
    whole = llm("the hand", max_tokens=9, **greedy)["choices"][0]["text"]
    parts = llm("the hand", max_tokens=9, stream=True, **greedy)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole
    for words in ("na\u00efve \U0001f600 e\u0301\r\n\t x", " two  spaces ", "\u65e5\u672c\u8a9e"):
        tokens = llm.tokenize(words.encode(), add_bos=False)
        assert llm.detokenize(tokens).decode() == words


# --- Files -------------------------------------------------------------------------------------

ARCH = kv("general.architecture", text("llama"))
T = [tensor("t", (4,))]
LONG_TEXT = text("")._replace(payload=(2**62).to_bytes(8, "little"))
LONG_ARRAY = text("")._replace(type_id=9, payload=b"\4\0\0\0" + (2**61).to_bytes(8, "little"))
HOSTILE = [
    # ggml-org/llama.cpp#25596, #26946, ggml-org/ggml#1517
    ("no-rows", [ARCH], [tensor("t", (4, 0))], "dimension"),
    ("product", [ARCH], [tensor("t", (2**32, 2**32))], "t"),
    ("no-dimensions", [ARCH], [tensor("t", ())], "dimension"),
    ("type", [ARCH], [tensor("t", (4,), type_id=99)], "99"),
    # ggml-org/llama.cpp#24884
    ("key-twice", [ARCH, ARCH], T, "general.architecture"),
    ("tensor-twice", [ARCH], [tensor("t", (4,)), tensor("t", (4,), offset=32)], "t"),
    ("long-text", [ARCH, kv("x", LONG_TEXT)], T, "x"),
    ("long-array", [ARCH, kv("x", LONG_ARRAY)], T, "x"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "tensors", "named"), [c[1:] for c in HOSTILE], ids=[c[0] for c in HOSTILE]
)
def test_a_hostile_file_is_one_line_of_error(tmp_path, keys, tensors, named):
    path = write_bytes(tmp_path / "x.gguf", gguf_bytes(keys, tensors, bytes(128)))
    with pytest.raises(GGUFError, match=named) as error:
        GGUFFile(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [kv("", u32(1)), kv("general.name", text(b"\xff\xfe"))])
def test_an_odd_key_is_read_or_refused(tmp_path, key):
    path = write_bytes(tmp_path / "x.gguf", gguf_bytes([ARCH, key], T, bytes(64)))
    said = ""
    try:
        GGUFFile(path).close()
    except GGUFError as error:
        said = str(error)
    assert "\n" not in said


KEYS = {
    "context_length": ("UINT32", 128),
    "embedding_length": ("UINT32", 64),
    "block_count": ("UINT32", 2),
    "feed_forward_length": ("UINT32", 96),
    "attention.head_count": ("UINT32", 2),
    "attention.head_count_kv": ("UINT32", 2),
    "attention.layer_norm_rms_epsilon": ("FLOAT32", 1e-5),
    "rope.dimension_count": ("UINT32", 32),
    "rope.freq_base": ("FLOAT32", 10000.0),
}
SHAPES = {"attn_q": (64, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 64)}
SHAPES |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}


def write_llama(path, keys=(), left_out=(), types="INT32", alignment=32):
    """A small llama of always the same weights, its keys of other types of numbers."""
    of, rng = gguf.GGUFValueType, np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for key, (kind, value) in (KEYS | dict(keys)).items():
        if key in left_out:
            continue
        element = of.UINT32 if isinstance(value, list) else None
        writer.add_key_value(f"llama.{key}", value, of[kind], element)
    tokens = ["<s>", "</s>", *byte_alphabet(), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    of_types = [3, 3] + [1] * (len(tokens) - 2)
    writer.add_key_value("tokenizer.ggml.token_type", of_types, of.ARRAY, of[types])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    tensors = {name: (len(tokens), 64) for name in ("token_embd", "output")} | {
        "output_norm": (64,)
    }
    for layer in range(2):
        norms = {"attn_norm": (64,), "ffn_norm": (64,)}
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in (SHAPES | norms).items()}
    for name, shape in tensors.items():
        values = rng.standard_normal(shape) * (0.1 if "blk" in name else 1)
        writer.add_tensor(
            f"{name}.weight", (1 + 0.1 * values if len(shape) == 1 else values).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(path):
    with Engine.load(path, n_threads=1) as engine, engine.session(n_ctx=96) as session:
        return np.array(session.prefill(list(range(2, 50))))


def test_numbers_of_other_types_are_the_same_model(tmp_path):
    """EricLBuehler/mistral.rs#2215: counts and types of tokens in other kinds of integers."""
    heads = "attention.head_count"
    others = [
        {"types": "UINT32"},
        {
            "keys": {
                heads: ("INT32", 2),
                "block_count": ("UINT16", 2),
                "context_length": ("UINT64", 128),
            }
        },
        {"keys": {"attention.layer_norm_rms_epsilon": ("FLOAT64", 1e-5)}},
        {"keys": {heads: ("ARRAY", [2, 2]), f"{heads}_kv": ("ARRAY", [2, 2])}},
        {"left_out": ("rope.freq_base", "rope.dimension_count", f"{heads}_kv")},
        {"alignment": 64},
    ]
    plain = logits_of(write_llama(tmp_path / "plain.gguf"))
    for i, other in enumerate(others):
        found = logits_of(write_llama(tmp_path / f"{i}.gguf", **other))
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5, err_msg=str(other))
    keys = {"rope.freq_base": ("FLOAT32", 100.0)}  # it is not the same whatever is written
    assert abs(logits_of(write_llama(tmp_path / "x.gguf", keys)) - plain).max() > 1e-3


def test_bytes_after_the_last_tensor_are_left_and_a_cut_file_is_refused(tmp_path, path):
    """ollama/ollama#8456: a model file had bytes behind its last tensor."""
    data = path.read_bytes()
    longer = write_bytes(tmp_path / "longer.gguf", data + bytes(777))
    np.testing.assert_array_equal(logits_of(longer), logits_of(path))
    shorter = write_bytes(tmp_path / "shorter.gguf", data[:-100])
    for file, code in ((longer, 0), (shorter, 1)):
        command = [sys.executable, "-P", "-m", "tamis", "inspect", "-m", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == code


# --- Tokens ------------------------------------------------------------------------------------


def qwen2(*words):
    """A tokenizer cut as Qwen2's, of bytes and of these words, each merged from the left."""
    letter = byte_alphabet()
    spelt = ["".join(letter[byte] for byte in word.encode()) for word in words]
    merges = [f"{word[:i]} {word[i]}" for word in spelt for i in range(1, len(word))]
    merged = [word[: i + 1] for word in spelt for i in range(1, len(word))]
    tokens = [*letter, *dict.fromkeys(merged)]
    vocab = make_vocab(
        "gpt2", [(t, TokenType.NORMAL) for t in tokens], merges=dict.fromkeys(merges), pre="qwen2"
    )
    return tokenizer_for(vocab)


def pieces(tokenizer, words):
    return [tokenizer.decode([token]) for token in tokenizer.encode(words, add_special=False)]


def test_line_breaks_are_one_token_before_a_letter_too():
    """ggml-org/llama.cpp#6809: two line breaks were two tokens where a letter came next."""
    tokenizer = qwen2("\n\n\n")
    assert pieces(tokenizer, "a\n\nb") == ["a", "\n\n", "b"]
    assert pieces(tokenizer, "a\n\n\nb") == ["a", "\n\n\n", "b"]


def test_runs_of_symbols_are_one_word_and_digits_are_none():
    """kekzl/imp#660: symbols were cut one by one, digits joined."""
    tokenizer = qwen2("->", "):\n", "(x", "2024", " +=")
    assert pieces(tokenizer, "->") == ["->"]
    assert pieces(tokenizer, "(x):\n") == ["(x", "):\n"]
    assert pieces(tokenizer, "2024") == ["2", "0", "2", "4"]
    assert pieces(tokenizer, "x +=2") == ["x", " +=", "2"]


def test_decomposed_letters_are_the_composed_ones():
    """zspacelabs/wordchipper#387, ggml-org/llama.cpp#6980: Qwen2's models have read NFC."""
    tokenizer = qwen2("\u00e9", "\ud55c", "\u1ec7", "\u00c5")
    for apart, composed in (
        ("cafe\u0301", "caf\u00e9"),
        ("\u1112\u1161\u11ab", "\ud55c"),
        ("Vie\u0323\u0302t", "Vi\u1ec7t"),
        ("\u212b", "\u00c5"),
    ):
        assert pieces(tokenizer, apart) == pieces(tokenizer, composed)
        assert composed[-1] in pieces(tokenizer, composed) or composed == "Vi\u1ec7t"
