"""The module llama_cpp: its names, its chat formats, its low-level objects."""

import ast
import importlib

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.flat.named_formats import NAMED, OF_THE_FILE

MESSAGES = [
    {"role": "system", "content": "SYS"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec()))


@pytest.fixture
def llama_cpp(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "bindings" / "tamis_llama_cpp")
    found = importlib.import_module("llama_cpp")
    return found


def module(name):
    return importlib.import_module(f"llama_cpp.{name}")


def test_every_module_imports_and_has_what_programs_take_of_it(llama_cpp):
    assert llama_cpp.__version__
    names = (
        "Llama LlamaGrammar LlamaCache LlamaState LlamaTokenizer LogitsProcessor StoppingCriteria "
        "LogitsProcessorList StoppingCriteriaList LlamaDraftModel LlamaRAMCache LlamaDiskCache "
        "LLAMA_MAX_DEVICES LLAMA_SPLIT_MODE_LAYER LLAMA_FTYPE_MOSTLY_Q4_K_M GGML_TYPE_Q8_0 "
        "LLAMA_ROPE_SCALING_TYPE_YARN LLAMA_POOLING_TYPE_RANK CreateCompletionResponse "
        "ChatCompletionRequestMessage ChatCompletionTool llama_decode llama_token_bos"
    )
    assert not [name for name in names.split() if not hasattr(llama_cpp, name)]
    assert llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M == 15
    assert llama_cpp.LLAMA_TOKEN_ATTR_SINGLE_WORD == 512
    for name in ("_internals", "llama_cache", "llama_grammar", "llama_tokenizer"):
        assert module(name).__doc__
    lookup = module("llama_speculative").LlamaPromptLookupDecoding
    found = lookup.find_candidate_pred_tokens(np.array([1, 2, 3, 1, 2, 3, 1, 2, 3]), 3, 2)
    assert found.tolist() == [1, 2]


def test_a_program_may_register_formats_and_handlers(llama_cpp, path):
    formats = module("llama_chat_format")

    @formats.register_chat_format("shouting")
    def shouting(*, messages, **kwargs):
        text = "".join(m["content"].upper() for m in messages)
        return formats.ChatFormatterResponse(prompt=text, stop="hand", added_special=True)

    @formats.register_chat_completion_handler("silent")
    def silent(*, llama, messages, **kwargs):
        return {"said": len(messages)}

    try:
        with pytest.raises(ValueError, match="registered already"):
            formats.register_chat_format("shouting")(shouting)
        llm = llama_cpp.Llama(path, n_ctx=256, chat_format="shouting", verbose=False)
        ask = [{"role": "user", "content": "the hand"}]
        found = llm.create_chat_completion(ask, max_tokens=4, temperature=0)
        assert found["usage"]["prompt_tokens"] == len(llm.tokenize(b"THE HAND", add_bos=False))
        handler = formats.get_chat_completion_handler("vicuna")
        vicuna = handler(llama=llm, messages=ask, max_tokens=4, temperature=0)
        assert vicuna["usage"]["prompt_tokens"] > 50
        assert [*handler(llama=llm, messages=ask, max_tokens=2, stream=True)]
        silent_llm = llama_cpp.Llama(path, n_ctx=256, chat_format="silent")
        assert silent_llm.create_chat_completion(ask) == {"said": 1}
    finally:
        for name in ("shouting", "silent"):
            formats.LlamaChatCompletionHandlerRegistry().unregister_chat_handler(name)
    with pytest.raises(formats.LlamaChatCompletionHandlerNotFoundException, match="vicuna"):
        formats.get_chat_completion_handler("shouting")
    handler = formats.Llava15ChatHandler(clip_model_path="nowhere.gguf")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        llama_cpp.Llama(path, n_ctx=256, chat_handler=handler)


def test_every_named_format_writes_the_conversation(llama_cpp, path):
    formats, n = module("llama_chat_format"), 0
    for name in NAMED:
        found = formats.named_formatter(name)(messages=MESSAGES)
        places = [found.prompt.index(m["content"]) for m in MESSAGES]
        assert places == sorted(places), name
        assert found.stops
        assert not found.prompt.endswith(("Q2", " ")) or name in ("chatglm3", "open-orca")
        n += 1
    assert n == 25
    for name in OF_THE_FILE:
        assert llama_cpp.Llama(path, n_ctx=64, chat_format=name)
    assert formats.format_zephyr(messages=MESSAGES[1:2]).prompt == (
        "<|user|>\nQ1</s>\n<|assistant|>\n"
    )
    tags = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    config = {"chat_template": tags, "bos_token": "<s>", "eos_token": "</s>"}
    formatter = formats.hf_tokenizer_config_to_chat_formatter(config)
    assert formatter(messages=MESSAGES[1:2]).prompt == "<s>Q1</s></s>"
    with pytest.raises(ValueError, match="eos_token"):
        formats.hf_tokenizer_config_to_chat_formatter({**config, "eos_token": None})


def test_handles_of_a_llama_are_those_of_llama_h(llama_cpp, path):
    llm = llama_cpp.Llama(path, n_ctx=64, verbose=False)
    tokens = llm.tokenize(b"the hand over")
    llm.eval(tokens)
    row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    assert int(row.argmax()) == llm.sample(temp=0) == llm.sample(temp=0, idx=len(tokens) - 1)
    with pytest.raises(ValueError, match="logits_all"):
        llm.sample(idx=0)
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    assert llama_cpp.llama_vocab_n_tokens(vocab) == llm.n_vocab()
    assert (
        llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)
        == len(tokens) - 1
    )
    llm.close()


def test_a_vocabulary_alone_tokenizes_and_nothing_else(llama_cpp, path):
    llm = llama_cpp.Llama(path, vocab_only=True)
    whole = llama_cpp.Llama(path, n_ctx=64)
    assert llm.tokenize(b"the hand") == whole.tokenize(b"the hand")
    assert (llm.n_vocab(), llm.n_embd()) == (whole.n_vocab(), whole.n_embd())
    with pytest.raises(ValueError, match="vocab_only"):
        llm.eval([1, 2])
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(path, params)
    assert llama_cpp.llama_model_n_embd(model) == whole.n_embd()
    assert not llama_cpp.llama_init_from_model(model, llama_cpp.llama_context_default_params())
    assert b"vocab_only" in llama_cpp.tamis_last_error()[1]


def test_fields_without_effect_are_taken_and_logged_and_others_refused(llama_cpp):
    lines, params = [], llama_cpp.llama_context_default_params()
    llama_cpp.llama_log_set(lambda level, text, data: lines.append(text.decode()), None)
    try:
        params.logits_all, params.flash_attn_type, params.swa_full = False, 1, True
        assert not lines, "what is done here anyway"
        params.yarn_ext_factor = 0.5
        assert ["yarn_ext_factor = 0.5" in line for line in lines] == [True]
        with pytest.raises(AttributeError):
            params.n_ctxx = 5
    finally:
        llama_cpp.llama_log_set(None, None)


def test_a_low_level_program_of_llama_cpp_runs(llama_cpp, path):
    internals = module("_internals")
    params = llama_cpp.llama_model_default_params()
    params.load_mode, params.check_tensors = llama_cpp.LLAMA_LOAD_MODE_MMAP, False
    model = internals.LlamaModel(path_model=path, params=params)
    cparams = llama_cpp.llama_context_default_params()
    cparams.n_ctx = 64
    context = internals.LlamaContext(model=model, params=cparams)
    tokens, n = model.tokenize(b"the hand over there", add_bos=True, special=True), 0
    batch = internals.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    sampler, found = internals.LlamaSampler(), []
    sampler.add_greedy()
    feed = tokens
    for _ in range(4):
        batch.set_batch(feed, n_past=n, logits_all=False)
        context.decode(batch)
        n += len(feed)
        feed = [sampler.sample(context, -1)]
        found += feed
    llm = llama_cpp.Llama(path, n_ctx=64)
    greedy = llm.generate(tokens, temp=0)
    assert found == [next(greedy) for _ in range(4)]

    extended = llama_cpp.llama_batch_ext_init(context.ctx)
    assert llama_cpp.llama_batch_ext_add_token(extended, 0, feed[0]) == 0
    assert llama_cpp.llama_batch_ext_add_token(extended, 5, feed[0]) == -3
    assert llama_cpp.llama_batch_ext_add_token(extended, 0, 1 << 20) == -2
    decode = llama_cpp.LLAMA_PROCESS_TYPE_DECODE
    assert llama_cpp.llama_process(context.ctx, decode, extended) == -1, "no position"
    assert llama_cpp.llama_batch_ext_set_pos(extended, 0, np.array([n], np.int32))
    assert llama_cpp.llama_batch_ext_set_output_logits(extended, 0, True)
    assert llama_cpp.llama_process(context.ctx, decode, extended) == 0
    assert int(llama_cpp.llama_get_logits_ith(context.ctx, 0).argmax()) == next(greedy)
    model.close()
    assert context.ctx is None


def test_the_package_has_no_code_beside_names(root):
    """What it does is tamis's, and tested there."""
    for path in (root / "bindings" / "tamis_llama_cpp").rglob("*.py"):
        if path.name != "_internals.py":
            tree = ast.parse(path.read_text())
            assert not [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While | ast.If)]
