"""The flat API for C programs: the header, and conversion between C's arguments and Python's.

`tools/build_capi.py` builds libtamis from it. A handle is a number, not an address: C programs only
pass it back. A pointer that a function returns stays valid until the next call that returns the
same kind of thing for the same handle.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
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
typedef void (*ggml_log_callback)(int32_t level, const char * text, void * user_data);

struct llama_model_params {
    int32_t n_gpu_layers;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    bool vocab_only;
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
struct llama_perf_context_data {
    double t_start_ms;
    double t_load_ms;
    double t_p_eval_ms;
    double t_eval_ms;
    int32_t n_p_eval;
    int32_t n_eval;
    int32_t n_reused;
};
struct llama_perf_sampler_data { double t_sample_ms; int32_t n_sample; };
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
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_model_n_ctx_train(const struct llama_model * model);
int32_t llama_model_n_embd(const struct llama_model * model);
int32_t llama_model_n_layer(const struct llama_model * model);
int32_t llama_model_n_head(const struct llama_model * model);
int32_t llama_model_n_head_kv(const struct llama_model * model);
uint64_t llama_model_size(const struct llama_model * model);
uint64_t llama_model_n_params(const struct llama_model * model);
int32_t llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
int32_t llama_model_meta_count(const struct llama_model * model);
int32_t llama_model_meta_val_str(const struct llama_model * model, const char * key, char * buf, size_t buf_size);
const char * llama_model_chat_template(const struct llama_model * model, const char * name);
const struct llama_model * llama_get_model(const struct llama_context * ctx);
llama_memory_t llama_get_memory(const struct llama_context * ctx);
uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_batch(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
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
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
const char * llama_vocab_get_text(const struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_eog(const struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_control(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_bos(const struct llama_vocab * vocab);
llama_token llama_vocab_eos(const struct llama_vocab * vocab);
llama_token llama_vocab_eot(const struct llama_vocab * vocab);
llama_token llama_vocab_nl(const struct llama_vocab * vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab * vocab);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t length, int32_t lstrip, bool special);
int32_t llama_detokenize(const struct llama_vocab * vocab, const llama_token * tokens, int32_t n_tokens, char * text, int32_t text_len_max, bool remove_special, bool unparse_special);
int32_t llama_chat_apply_template(const char * tmpl, const struct llama_chat_message * chat, size_t n_msg, bool add_ass, char * buf, int32_t length);
struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
int32_t llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * smpl);
int32_t llama_sampler_chain_n(const struct llama_sampler * chain);
struct llama_sampler * llama_sampler_init_greedy(void);
struct llama_sampler * llama_sampler_init_dist(uint32_t seed);
struct llama_sampler * llama_sampler_init_top_k(int32_t k);
struct llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_typical(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_temp(float t);
struct llama_sampler * llama_sampler_init_penalties(int32_t penalty_last_n, float penalty_repeat, float penalty_freq, float penalty_present);
struct llama_sampler * llama_sampler_init_grammar(const struct llama_vocab * vocab, const char * grammar_str, const char * grammar_root);
int32_t llama_sampler_accept(struct llama_sampler * smpl, llama_token token);
int32_t llama_sampler_reset(struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_clone(const struct llama_sampler * smpl);
int32_t llama_sampler_free(struct llama_sampler * smpl);
llama_token llama_sampler_sample(struct llama_sampler * smpl, struct llama_context * ctx, int32_t idx);
size_t llama_state_get_size(struct llama_context * ctx);
size_t llama_state_get_data(struct llama_context * ctx, uint8_t * dst, size_t size);
size_t llama_state_set_data(struct llama_context * ctx, const uint8_t * src, size_t size);
int32_t llama_detach_threadpool(struct llama_context * ctx);
const char * llama_flash_attn_type_name(int32_t flash_attn_type);
const char * llama_ftype_name(int32_t ftype);
bool llama_get_causal_attn(const struct llama_context * ctx);
int32_t llama_load_mode_from_str(const char * str);
const char * llama_load_mode_name(int32_t load_mode);
size_t llama_max_devices(void);
size_t llama_max_parallel_sequences(void);
size_t llama_max_tensor_buft_overrides(void);
int32_t llama_memory_seq_div(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d);
const char * llama_model_cls_label(const struct llama_model * model, uint32_t i);
llama_token llama_model_decoder_start_token(const struct llama_model * model);
int32_t llama_model_ftype(const struct llama_model * model);
bool llama_model_has_decoder(const struct llama_model * model);
bool llama_model_has_encoder(const struct llama_model * model);
bool llama_model_is_diffusion(const struct llama_model * model);
bool llama_model_is_hybrid(const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);
int32_t llama_model_meta_key_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
const char * llama_model_meta_key_str(int32_t key);
int32_t llama_model_meta_val_str_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
uint32_t llama_model_n_cls_out(const struct llama_model * model);
int32_t llama_model_n_embd_inp(const struct llama_model * model);
int32_t llama_model_n_embd_out(const struct llama_model * model);
int32_t llama_model_n_layer_nextn(const struct llama_model * model);
int32_t llama_model_n_swa(const struct llama_model * model);
float llama_model_rope_freq_scale_train(const struct llama_model * model);
int32_t llama_model_rope_type(const struct llama_model * model);
uint32_t llama_n_ctx_seq(const struct llama_context * ctx);
uint32_t llama_n_rs_seq(const struct llama_context * ctx);
int32_t llama_n_threads(struct llama_context * ctx);
int32_t llama_n_threads_batch(struct llama_context * ctx);
int32_t llama_numa_init(int32_t numa);
int32_t llama_perf_context_print(const struct llama_context * ctx);
int32_t llama_perf_context_reset(struct llama_context * ctx);
int32_t llama_perf_sampler_print(const struct llama_sampler * chain);
int32_t llama_perf_sampler_reset(struct llama_sampler * chain);
int32_t llama_pooling_type(const struct llama_context * ctx);
struct llama_sampler * llama_sampler_chain_get(struct llama_sampler * chain, int32_t i);
struct llama_sampler * llama_sampler_chain_remove(struct llama_sampler * chain, int32_t i);
int32_t llama_sampler_copy(const struct llama_sampler * src, struct llama_sampler * dst);
uint32_t llama_sampler_get_seed(const struct llama_sampler * smpl);
struct llama_sampler * llama_sampler_init_mirostat(int32_t n_vocab, uint32_t seed, float tau, float eta, int32_t m);
struct llama_sampler * llama_sampler_init_mirostat_v2(uint32_t seed, float tau, float eta);
struct llama_sampler * llama_sampler_init_temp_ext(float t, float delta, float exponent);
struct llama_sampler * llama_sampler_init_top_n_sigma(float n);
struct llama_sampler * llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
const char * llama_sampler_name(const struct llama_sampler * smpl);
int32_t llama_set_causal_attn(struct llama_context * ctx, bool causal_attn);
int32_t llama_set_warmup(struct llama_context * ctx, bool warmup);
size_t llama_state_seq_get_data(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id);
size_t llama_state_seq_get_size(struct llama_context * ctx, llama_seq_id seq_id);
size_t llama_state_seq_set_data(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id dest_seq_id);
bool llama_supports_gpu_offload(void);
bool llama_supports_mlock(void);
bool llama_supports_mmap(void);
bool llama_supports_rpc(void);
int32_t llama_synchronize(struct llama_context * ctx);
llama_token llama_vocab_fim_mid(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_pad(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_pre(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_rep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_sep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_suf(const struct llama_vocab * vocab);
bool llama_vocab_get_add_eos(const struct llama_vocab * vocab);
bool llama_vocab_get_add_sep(const struct llama_vocab * vocab);
int32_t llama_vocab_get_attr(const struct llama_vocab * vocab, llama_token token);
float llama_vocab_get_score(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_mask(const struct llama_vocab * vocab);
llama_token llama_vocab_pad(const struct llama_vocab * vocab);
llama_token llama_vocab_sep(const struct llama_vocab * vocab);
int32_t llama_vocab_type(const struct llama_vocab * vocab);
struct llama_perf_context_data llama_perf_context(const struct llama_context * ctx);
struct llama_perf_sampler_data llama_perf_sampler(const struct llama_sampler * chain);
int32_t llama_log_set(ggml_log_callback log_callback, void * user_data);
bool llama_state_save_file(struct llama_context * ctx, const char * path_session, const llama_token * tokens, size_t n_token_count);
bool llama_state_load_file(struct llama_context * ctx, const char * path_session, llama_token * tokens_out, size_t n_token_capacity, size_t * n_token_count_out);
size_t llama_state_seq_save_file(struct llama_context * ctx, const char * filepath, llama_seq_id seq_id, const llama_token * tokens, size_t n_token_count);
size_t llama_state_seq_load_file(struct llama_context * ctx, const char * filepath, llama_seq_id dest_seq_id, llama_token * tokens_out, size_t n_token_capacity, size_t * n_token_count_out);
int32_t tamis_set_attn_policy(struct llama_context * ctx, const char * attn, const char * prefill);
"""  # noqa: E501 - one declaration a line, as llama.h has them

# Parameters that are memory: the parameter that says how many elements it has, and their bytes.
_MEMORY = {
    "buf": (("buf_size", "length"), 1),
    "text": (("text_len_max",), 1),
    "tokens": (("n_tokens_max", "n_tokens", "n_token_count"), 4),
    "tokens_out": (("n_token_capacity",), 4),
    "dst": (("size",), 1),
    "src": (("size",), 1),
}
_DECLARED = re.compile(r"^(?P<kind>[^()]*?)(?P<name>\w+)\((?P<parameters>.*)\);$", re.MULTILINE)
_HANDLE = re.compile(r"((const )?struct llama_(model|context|vocab|sampler) \*|llama_memory_t)$")
_kept: dict[Any, Any] = {}  # objects to which C holds pointers


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
    if kind == "const struct llama_chat_message *":
        return [_message(ffi, value[i]) for i in range(values["n_msg"])] if value else []
    if kind == "ggml_abort_callback":
        return value or None
    if kind == "size_t *":
        return ffi.buffer(value, ffi.sizeof("size_t")) if value else None
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
    for name in _fields(params):
        field = getattr(value, name)
        if name in ("attn", "prefill"):
            field = (_bytes(ffi, field) or b"dense").decode()
        elif name.endswith("callback"):
            field = field or None
        setattr(params, name, field)
    return params


def _fields(record: Any) -> Iterable[str]:
    return getattr(record, "_fields", None) or [field.name for field in fields(record)]


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
    for name in _fields(params):
        value = getattr(params, name)
        if isinstance(value, str):
            value = _kept.setdefault((value,), ffi.new("char[]", value.encode()))
        if value is not None:
            setattr(found, name, value)
    return found[0]


def _last_error(ffi: Any, function: Callable[..., Any], kind: str, *rest: Any) -> Any:
    return _result(ffi, kind, function()[1], ("tamis_last_error",))


def _log_set(
    ffi: Any, function: Callable[..., Any], kind: str, parameters: Any, callback: Any, data: Any
) -> Any:
    def log(level: int, text: bytes, user_data: Any) -> None:
        callback(level, ffi.new("char[]", text), data)

    return function(log if callback else None, None)


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
    "llama_log_set": _log_set,
    "llama_batch_init": _batch_init,
    "llama_batch_free": _batch_free,
    "llama_batch_get_one": _batch_get_one,
}
