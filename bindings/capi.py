"""The flat API for C programs: the header, and what turns C's arguments into Python's and back.

`tools/build_capi.py` makes libtamis of it. Handles are pointers to nothing: C programs only hand
them back. What a function returns a pointer to lives until the next call that makes the same
thing of the same handle.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import tamis.bindings.llama as api

STRUCTS = """
struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_sampler;
struct llama_memory_i;
typedef struct llama_memory_i * llama_memory_t;
typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
typedef bool (*llama_progress_callback)(float progress, void * user_data);
typedef bool (*ggml_abort_callback)(void * data);

struct llama_model_params {
    int32_t n_gpu_layers;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    int32_t n_threads;
};
struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t pooling_type;
    bool embeddings;
    bool offload_kqv;
    int32_t type_k;
    int32_t type_v;
    ggml_abort_callback abort_callback;
    void * abort_callback_data;
    const char * attn;
    const char * prefill;
    int32_t audit;
};
struct llama_sampler_chain_params { bool no_perf; };
struct llama_chat_message { const char * role; const char * content; };
struct llama_logit_bias { llama_token token; float bias; };
typedef struct llama_batch {
    int32_t n_tokens;
    llama_token * token;
    float * embd;
    llama_pos * pos;
    int32_t * n_seq_id;
    llama_seq_id ** seq_id;
    int8_t * logits;
} llama_batch;
"""

FUNCTIONS = """
void llama_backend_init(void);
void llama_backend_free(void);
int64_t llama_time_us(void);
const char * llama_print_system_info(void);
const char * tamis_last_error(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_sampler_chain_params llama_sampler_chain_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path_model, struct llama_model_params params);
int32_t llama_model_free(struct llama_model * model);
struct llama_context * llama_init_from_model(struct llama_model * model, struct llama_context_params params);
int32_t llama_free(struct llama_context * ctx);
struct llama_vocab * llama_model_get_vocab(struct llama_model * model);
int32_t llama_model_n_ctx_train(struct llama_model * model);
int32_t llama_model_n_embd(struct llama_model * model);
int32_t llama_model_n_layer(struct llama_model * model);
int32_t llama_model_n_head(struct llama_model * model);
int32_t llama_model_n_head_kv(struct llama_model * model);
uint64_t llama_model_size(struct llama_model * model);
uint64_t llama_model_n_params(struct llama_model * model);
int32_t llama_model_desc(struct llama_model * model, char * buf, size_t buf_size);
int32_t llama_model_meta_count(struct llama_model * model);
int32_t llama_model_meta_val_str(struct llama_model * model, const char * key, char * buf, size_t buf_size);
const char * llama_model_chat_template(struct llama_model * model, const char * name);
struct llama_model * llama_get_model(struct llama_context * ctx);
llama_memory_t llama_get_memory(struct llama_context * ctx);
uint32_t llama_n_ctx(struct llama_context * ctx);
uint32_t llama_n_batch(struct llama_context * ctx);
uint32_t llama_n_ubatch(struct llama_context * ctx);
uint32_t llama_n_seq_max(struct llama_context * ctx);
int32_t llama_set_n_threads(struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
int32_t llama_set_abort_callback(struct llama_context * ctx, ggml_abort_callback abort_callback, void * data);
int32_t llama_set_embeddings(struct llama_context * ctx, bool embeddings);
int32_t llama_memory_clear(llama_memory_t mem, bool data);
bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
int32_t llama_memory_seq_cp(llama_memory_t mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1);
int32_t llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq_id);
int32_t llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta);
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
bool llama_memory_can_shift(llama_memory_t mem);
llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
llama_batch llama_batch_get_one(llama_token * tokens, int32_t n_tokens);
void llama_batch_free(llama_batch batch);
int32_t llama_decode(struct llama_context * ctx, llama_batch batch);
float * llama_get_logits(struct llama_context * ctx);
float * llama_get_logits_ith(struct llama_context * ctx, int32_t i);
float * llama_get_embeddings(struct llama_context * ctx);
float * llama_get_embeddings_ith(struct llama_context * ctx, int32_t i);
float * llama_get_embeddings_seq(struct llama_context * ctx, llama_seq_id seq_id);
int32_t llama_vocab_n_tokens(struct llama_vocab * vocab);
const char * llama_vocab_get_text(struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_eog(struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_control(struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_bos(struct llama_vocab * vocab);
llama_token llama_vocab_eos(struct llama_vocab * vocab);
llama_token llama_vocab_eot(struct llama_vocab * vocab);
llama_token llama_vocab_nl(struct llama_vocab * vocab);
bool llama_vocab_get_add_bos(struct llama_vocab * vocab);
int32_t llama_tokenize(struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(struct llama_vocab * vocab, llama_token token, char * buf, int32_t length, int32_t lstrip, bool special);
int32_t llama_detokenize(struct llama_vocab * vocab, llama_token * tokens, int32_t n_tokens, char * text, int32_t text_len_max, bool remove_special, bool unparse_special);
int32_t llama_chat_apply_template(const char * tmpl, struct llama_chat_message * chat, size_t n_msg, bool add_ass, char * buf, int32_t length);
struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
int32_t llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * smpl);
int32_t llama_sampler_chain_n(struct llama_sampler * chain);
struct llama_sampler * llama_sampler_init_greedy(void);
struct llama_sampler * llama_sampler_init_dist(uint32_t seed);
struct llama_sampler * llama_sampler_init_top_k(int32_t k);
struct llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_typical(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_temp(float t);
struct llama_sampler * llama_sampler_init_penalties(int32_t penalty_last_n, float penalty_repeat, float penalty_freq, float penalty_present);
struct llama_sampler * llama_sampler_init_grammar(struct llama_vocab * vocab, const char * grammar_str, const char * grammar_root);
int32_t llama_sampler_accept(struct llama_sampler * smpl, llama_token token);
int32_t llama_sampler_reset(struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_clone(struct llama_sampler * smpl);
int32_t llama_sampler_free(struct llama_sampler * smpl);
llama_token llama_sampler_sample(struct llama_sampler * smpl, struct llama_context * ctx, int32_t idx);
size_t llama_state_get_size(struct llama_context * ctx);
size_t llama_state_get_data(struct llama_context * ctx, uint8_t * dst, size_t size);
size_t llama_state_set_data(struct llama_context * ctx, uint8_t * src, size_t size);
int32_t tamis_set_attn_policy(struct llama_context * ctx, const char * attn, const char * prefill);
"""  # noqa: E501 - one declaration a line, as llama.h has them

# Parameters that are memory: which parameter says how many elements it has, and their bytes.
_MEMORY = {
    "buf": (("buf_size", "length"), 1),
    "text": (("text_len_max",), 1),
    "tokens": (("n_tokens_max", "n_tokens"), 4),
    "dst": (("size",), 1),
    "src": (("size",), 1),
}
_DECLARED = re.compile(r"^(?P<kind>[^()]*?)(?P<name>\w+)\((?P<parameters>.*)\);$", re.MULTILINE)
_HANDLE = re.compile(r"(struct llama_(model|context|vocab|sampler) \*|llama_memory_t)$")
_kept: dict[Any, Any] = {}  # what C has pointers to


def header() -> str:
    """The text of tamis.h."""
    return (
        "/* tamis: llama.h's functions, made by tamis.tools.build_capi. */\n"
        "#ifndef TAMIS_H\n#define TAMIS_H\n"
        "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n"
        '#ifdef __cplusplus\nextern "C" {\n#endif\n'
        "#define LLAMA_DEFAULT_SEED 0xFFFFFFFF\n#define LLAMA_TOKEN_NULL -1\n"
        f"{STRUCTS}{FUNCTIONS}"
        "#ifdef __cplusplus\n}\n#endif\n#endif\n"
    )


def define(ffi: Any) -> None:
    """Make the declared functions of the library `ffi` do what the flat API's do."""
    for match in _DECLARED.finditer(FUNCTIONS):
        name, kind = match["name"], match["kind"].strip()
        parameters = [_split(p) for p in match["parameters"].split(", ") if p != "void"]
        function = _OWN.get(name) or _generic
        glue = functools.partial(function, ffi, getattr(api, name), kind, parameters)
        ffi.def_extern(name=name)(glue)


def _split(parameter: str) -> tuple[str, str]:
    kind, _, name = parameter.rpartition(" ")
    return kind, name


def _generic(
    ffi: Any, function: Callable[..., Any], kind: str, parameters: list[tuple[str, str]], *args: Any
) -> Any:
    """Call a function with C's arguments as Python's, and give its result as C's."""
    values = dict(zip((name for _, name in parameters), args, strict=True))
    found = [_argument(ffi, k, name, values) for k, name in parameters]
    if function in (api.llama_free, api.llama_model_free, api.llama_sampler_free):
        for key in [key for key in _kept if key[1:2] == (found[0],)]:
            del _kept[key]
    return _result(ffi, kind, function(*found), (function.__name__, *found[:1]))


def _argument(ffi: Any, kind: str, name: str, values: dict[str, Any]) -> Any:
    value = values[name]
    if _HANDLE.match(kind):
        return int(ffi.cast("intptr_t", value))
    if kind == "llama_batch":
        return _batch(ffi, value)
    if kind.startswith("struct") and kind.endswith("params"):
        return _params(ffi, kind.removeprefix("struct "), value)
    if kind == "struct llama_chat_message *":
        return [_message(ffi, value[i]) for i in range(values["n_msg"])] if value else []
    if kind == "ggml_abort_callback":
        return value or None
    if kind == "const char *":
        n = values.get("text_len", -1)
        return ffi.buffer(value, n)[:] if value and n >= 0 else _bytes(ffi, value)
    if name in _MEMORY:
        sizes, n_bytes = _MEMORY[name]
        n = next(values[s] for s in sizes if s in values)
        return ffi.buffer(value, max(n, 0) * n_bytes) if value else None
    return value


def _bytes(ffi: Any, text: Any) -> bytes | None:
    return ffi.string(text) if text else None


def _message(ffi: Any, message: Any) -> api.llama_chat_message:
    role, content = _bytes(ffi, message.role), _bytes(ffi, message.content)
    return api.llama_chat_message(role or b"", content or b"")


def _params(ffi: Any, kind: str, value: Any) -> Any:
    params = getattr(api, kind)()
    for name in params.__dataclass_fields__:
        field = getattr(value, name)
        if name in ("attn", "prefill"):
            field = (_bytes(ffi, field) or b"dense").decode()
        elif name.endswith("callback"):
            field = field or None
        setattr(params, name, field)
    return params


def _batch(ffi: Any, batch: Any) -> api.llama_batch:
    n = max(batch.n_tokens, 0)
    found = api.llama_batch(n_tokens=batch.n_tokens, embd=batch.embd or None)
    for name in ("token", "pos", "n_seq_id"):
        pointer = getattr(batch, name)
        setattr(found, name, ffi.buffer(pointer, 4 * n) if pointer else None)
    if batch.logits:
        found.logits = ffi.buffer(batch.logits, n)
    if batch.seq_id:
        counts = [batch.n_seq_id[i] if batch.n_seq_id else 1 for i in range(n)]
        found.seq_id = [ffi.buffer(batch.seq_id[i], 4 * max(k, 0)) for i, k in enumerate(counts)]
    return found


def _result(ffi: Any, kind: str, value: Any, key: tuple[Any, ...]) -> Any:
    if kind == "void":
        return None
    if _HANDLE.match(kind):
        return ffi.cast(kind, value)
    if kind == "const char *":
        _kept[key] = ffi.NULL if value is None else ffi.new("char[]", value)
        return _kept[key]
    if kind == "float *":
        _kept[key] = ffi.NULL if value is None else ffi.from_buffer("float[]", value)
        return _kept[key]
    if kind.startswith("struct"):
        return _struct(ffi, kind, value)
    return value


def _struct(ffi: Any, kind: str, params: Any) -> Any:
    found = ffi.new(f"{kind} *")
    for name in params.__dataclass_fields__:
        value = getattr(params, name)
        if isinstance(value, str):
            value = _kept.setdefault((value,), ffi.new("char[]", value.encode()))
        if value is not None:
            setattr(found, name, value)
    return found[0]


def _last_error(ffi: Any, function: Callable[..., Any], kind: str, *rest: Any) -> Any:
    return _result(ffi, kind, function()[1], ("tamis_last_error",))


def _batch_init(
    ffi: Any,
    function: Callable[..., Any],
    kind: str,
    parameters: Any,
    n: int,
    embd: int,
    n_seq: int,
) -> Any:
    made = function(n, embd, n_seq)
    batch = ffi.new("llama_batch *")
    if made is None:
        return batch[0]
    rows = ffi.from_buffer("llama_seq_id[]", made.seq_id)
    seq_id = ffi.new("llama_seq_id *[]", [rows + i * n_seq for i in range(n)])
    batch.token = ffi.from_buffer("llama_token[]", made.token)
    batch.pos = ffi.from_buffer("llama_pos[]", made.pos)
    batch.n_seq_id = ffi.from_buffer("int32_t[]", made.n_seq_id)
    batch.logits = ffi.from_buffer("int8_t[]", made.logits)
    batch.seq_id = seq_id
    _kept["batch", int(ffi.cast("intptr_t", batch.token))] = made, rows, seq_id
    return batch[0]


def _batch_free(ffi: Any, function: Any, kind: str, parameters: Any, batch: Any) -> None:
    """Free what llama_batch_init allocated; a second call does nothing."""
    _kept.pop(("batch", int(ffi.cast("intptr_t", batch.token))), None)


def _batch_get_one(
    ffi: Any, function: Any, kind: str, parameters: Any, tokens: Any, n_tokens: int
) -> Any:
    batch = ffi.new("llama_batch *")
    batch.token, batch.n_tokens = tokens, n_tokens
    return batch[0]


_OWN: dict[str, Callable[..., Any]] = {
    "tamis_last_error": _last_error,
    "llama_batch_init": _batch_init,
    "llama_batch_free": _batch_free,
    "llama_batch_get_one": _batch_get_one,
}
