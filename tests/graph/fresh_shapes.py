"""Conformance on fresh shapes, by hand: `python tests/graph/fresh_shapes.py [NAME ...] --seed 101`.

Each of the kit's models is given other widths, heads, depths and experts, and other optional
tensors. llama.cpp (the package llama-cpp-python must be importable) says which shapes that asks
for, by what it misses or refuses while loading; a mutation that it refuses altogether is drawn
again. Then both read the same ids, tamis in five ways. Of each model the folder keeps the spec and
llama.cpp's logits, which `--again` reads instead of drawing others.
"""

import argparse
import ctypes
import hashlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import kit_models
import kit_runs

from tamis.engine.engine import Engine

N_TRY, N_FIT, N_CTX = 40, 400, 256
Spec = dict[str, Any]
Array = np.ndarray[Any, Any]


# --- Another shape -----------------------------------------------------------------------------


class Mutation:
    """Draws other values of a spec's keys; what does not fit together llama.cpp refuses."""

    def __init__(self, spec: Spec, seed: str, boldness: float) -> None:
        self.spec = json.loads(json.dumps(spec))
        self.kv, self.prefix = self.spec["kv"], spec["arch"] + "."
        digest = hashlib.sha256(seed.encode()).digest()
        self.rng, self.p = np.random.default_rng(int.from_bytes(digest[:8], "little")), boldness

    def get(self, key: str) -> Any:
        found = self.kv.get(self.prefix + key)
        return found[1] if found else None

    def set(self, key: str, value: Any) -> None:
        if self.prefix + key in self.kv:
            self.kv[self.prefix + key][1] = value

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def lucky(self) -> bool:
        return bool(self.rng.random() < self.p)

    def drawn(self) -> Spec:
        for part in (self._depth, self._heads, self._widths, self._latent, self._experts):
            part()
        for part in (self._recurrent, self._windows, self._vocab):
            part()
        return self.spec

    def _depth(self) -> None:
        old = self.get("block_count")
        if not self.lucky() or self.get("hrm.layers_per_stack"):
            return
        new = old + self.pick(-1, 1, 2, 3)
        if new < 2:
            return
        for key, (types, value) in self.kv.items():
            if len(types) < 2 or not isinstance(value, list) or len(value) != old:
                continue
            if old != 4 or key.endswith("pattern"):  # four are sections of rotary pairs, too
                self.kv[key][1] = [value[i % old] for i in range(new)]
        self.set("block_count", new)
        self.spec["depths"] = [old, new]

    def _heads(self) -> None:
        if self.get("attention.kv_lora_rank") or not self.lucky():
            return
        n_kv, group = self.pick(1, 2, 3, 4), self.pick(1, 2, 3, 4)
        for key, n in (("head_count", n_kv * group), ("head_count_kv", n_kv)):
            old = self.get(f"attention.{key}")
            self.set(f"attention.{key}", [n * (x > 0) for x in old] if isinstance(old, list) else n)
        if self.get("attention.key_length") and self.lucky():
            self._head_dim(self.pick(16, 32, 48, 64, 80, 96, 128, 24, 40, 72))

    def _head_dim(self, n: int) -> None:
        old = self.get("attention.key_length")
        for end in ("", "_swa"):
            for key in ("attention.key_length", "attention.value_length"):
                if self.get(key + end) == old:
                    self.set(key + end, n)
            if self.get(f"rope.dimension_count{end}"):
                self.set(f"rope.dimension_count{end}", self.pick(n, n // 2))
        self.set("attention.key_length", n)
        sections = self.get("rope.dimension_sections")
        if sections and sum(sections) > n // 2 and self.lucky():
            self.set("rope.dimension_sections", [max(s * n // old // 2, 1) for s in sections])

    def _widths(self) -> None:
        if self.lucky():
            n = self.pick(64, 96, 128, 160, 192, 256, 320, 48, 72, 100, 132)
            if (
                self.lucky()
                and self.get("attention.key_length")
                and self.get("attention.head_count")
            ):
                heads = np.max(self.get("attention.head_count"))
                joint = int(heads) * self.get("attention.key_length")  # what some expect
                n = joint if joint % 4 == 0 else n
            self.set("embedding_length", n)
        for key in ("feed_forward_length", "expert_feed_forward_length"):
            old = self.get(key)
            if old and self.lucky():
                n = self.pick(96, 128, 160, 224, 288)
                self.set(key, [n * (x > 0) for x in old] if isinstance(old, list) else n)
        if self.get("expert_shared_feed_forward_length") and self.lucky():
            self.set("expert_shared_feed_forward_length", self.pick(64, 96, 160, 256))

    def _latent(self) -> None:
        if not self.get("attention.kv_lora_rank") or not self.lucky():
            return
        n_head, n_rot = self.pick(1, 2, 3, 4, 6), self.pick(16, 32, 64)
        n_latent, plain = self.pick(64, 96, 128, 256, 512), self.pick(32, 64, 96, 128)
        n_value = self.pick(32, 64, 96, 128)
        old = self.get("attention.head_count")
        heads = [n_head * (x > 0) for x in old] if isinstance(old, list) else n_head
        self.set("attention.head_count", heads)
        is_mla = self.get("attention.key_length_mla")
        for end in ("", "_swa"):
            self.set(f"attention.kv_lora_rank{end}", n_latent)
            self.set(f"rope.dimension_count{end}", n_rot)
            if is_mla:
                self.set(f"attention.key_length_mla{end}", plain + n_rot)
                self.set(f"attention.value_length_mla{end}", n_value)
                self.set(f"attention.key_length{end}", n_latent + n_rot)
                self.set(f"attention.value_length{end}", n_latent)
            else:
                self.set(f"attention.key_length{end}", plain + n_rot)
                self.set(f"attention.value_length{end}", n_value)
        if self.get("attention.q_lora_rank") and self.lucky():
            self.set("attention.q_lora_rank", self.pick(64, 96, 160))

    def _experts(self) -> None:
        if not self.get("expert_count"):
            return
        if self.lucky():
            n = self.pick(3, 4, 5, 8, 12, 16)
            self.set("expert_count", n)
            self.set("expert_used_count", min(self.pick(1, 2, 3, 4), n))
        if self.get("expert_shared_count") and self.lucky():
            self.set("expert_shared_count", self.pick(1, 2, 3))
        if self.get("leading_dense_block_count") and self.lucky():
            self.set("leading_dense_block_count", self.pick(0, 1, 2))
        for key, values in (("weights_norm", (False, True)), ("weights_scale", (0.0, 1.0, 2.5))):
            if self.get(f"expert_{key}") and self.lucky():
                self.set(f"expert_{key}", self.pick(*values))
        if self.get("expert_gating_func") and self.lucky():
            self.set("expert_gating_func", self.pick(1, 2))

    def _recurrent(self) -> None:
        if self.get("ssm.inner_size") and self.lucky():
            n_head, n_group = self.pick(2, 4, 6, 8), self.pick(1, 2)
            head = self.pick(32, 64, 128)
            if self.get("ssm.time_step_rank"):
                self.set("ssm.time_step_rank", n_head)
            if self.get("ssm.group_count"):
                self.set("ssm.group_count", n_group)
            n_inner = self.pick(n_head * head, 2 * self.get("embedding_length"))
            self.set("ssm.inner_size", n_inner)
            self.set("ssm.state_size", self.pick(16, 32, 64, 128, n_inner // n_head))
        if self.get("ssm.conv_kernel") and self.lucky():
            self.set("ssm.conv_kernel", self.pick(2, 3, 4, 5))
        if self.get("shortconv.l_cache") and self.lucky():
            self.set("shortconv.l_cache", self.pick(2, 3, 4, 5))
        if self.get("kda.head_dim") and self.lucky():
            self.set("kda.head_dim", self.pick(32, 64, 128))
        self.set("wkv.head_size", 64)  # of 32, llama.cpp's kernel for AVX-512 reads 64 at once
        if self.get("hyper_connection.count") and self.lucky():
            self.set("hyper_connection.count", self.pick(2, 3, 4))
        if isinstance(self.get("attention.recurrent_layers"), list) and self.lucky():
            self._other_layers_recurrent()

    def _other_layers_recurrent(self) -> None:
        """Another order of what layers are."""
        keys = ("attention.recurrent_layers", "attention.head_count", "attention.head_count_kv")
        keys += ("feed_forward_length",)
        order = self.rng.permutation(self.get("block_count")).tolist()
        for key in keys:
            if isinstance(old := self.get(key), list):
                self.set(key, [old[i] for i in order])

    def _windows(self) -> None:
        if self.get("attention.sliding_window") and self.lucky():
            self.set("attention.sliding_window", self.pick(8, 20, 32, 50))
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, list) and len(pattern) > 1 and self.lucky():
            self.set("attention.sliding_window_pattern", [self.pick(0, 1) for _ in pattern])
        for key in ("rope.freq_base", "rope.freq_base_swa"):
            if self.get(key) and self.lucky():
                self.set(key, self.pick(5000.0, 10000.0, 1e6))
        for key in (
            "final_logit_softcapping",
            "attn_logit_softcapping",
            "router_logit_softcapping",
        ):
            if self.get(key) and self.lucky():
                self.set(key, self.pick(10.0, 30.0, 50.0))
        for key in ("residual_scale", "embedding_scale", "logit_scale", "attention.clamp_kqv"):
            if self.get(key) and self.lucky():
                self.set(key, self.get(key) * self.pick(0.5, 0.75, 1.5))
        if self.get("expert_count") == 0 and self.get("use_parallel_residual") is False:
            self.set("use_parallel_residual", self.pick(True, False))

    def _vocab(self) -> None:
        if self.get("ple.layers") is None and self.lucky():
            n = self.pick(100, 128, 150, 257)
            self.set("vocab_size", n)
            for name, shape, _ in self.spec["tensors"]:
                if name == "token_embd.weight":
                    shape[1] = n


# --- The shapes that llama.cpp asks for --------------------------------------------------------


class Oracle:
    """llama.cpp, and what it says while it loads a file."""

    def __init__(self) -> None:
        os.environ["GGML_NO_BACKTRACE"] = "1"  # a debugger at each refusal takes seconds
        import llama_cpp

        self.c, self.said = llama_cpp, ""
        self._log = llama_cpp.llama_log_callback(self._heard)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def _heard(self, level: int, text: bytes, data: Any) -> None:
        self.said += text.decode(errors="replace")

    def load(self, path: Path) -> Any:
        self.said = ""
        return self.c.llama_model_load_from_file(
            str(path).encode(), self.c.llama_model_default_params()
        )

    def fits(self, spec: Spec, path: Path) -> bool:
        """Change the spec's tensors to those that its keys ask for; False where that fails."""
        _deepen(spec)
        for _ in range(N_FIT):
            write(spec, path, None)
            model = self.load(path)
            if model:
                self.c.llama_model_free(model)
                return True
            if not self._mend(spec):
                return False
        return False

    def _mend(self, spec: Spec) -> bool:
        tensors = spec["tensors"]
        wrong = re.search(
            r"tensor '(\S+)' has wrong shape; expected \[?([\d, ]+)\]?, got", self.said
        )
        if wrong:
            shape = [int(n) for n in wrong[2].split(",") if n.strip()]
            while len(shape) > 1 and shape[-1] == 1:
                shape.pop()
            next(t for t in tensors if t[0] == wrong[1])[1] = shape
            return True
        missing = re.search(r"missing tensor '(\S+)'", self.said)
        if missing:
            tensors.append([missing[1], [1], 0])
            return True
        if "wrong number of tensors" in self.said:
            loaded = self.asked()
            left = [t for t in tensors if t[0] in loaded]
            spec["tensors"], changed = left, len(left) < len(tensors)
            return changed
        return False

    def asked(self) -> set[str]:
        """Names of the tensors that the last load looked for."""
        return set(re.findall(r"loading tensor (\S+)", self.said))

    def logits(self, path: Path, ids: list[int], *, encoder: bool) -> Array:
        """With a KV cache of float32, then of float16: [2, n_tok, n_vocab]."""
        return np.array([self._logits(path, ids, type_kv, encoder=encoder) for type_kv in (0, 1)])

    def _logits(self, path: Path, ids: list[int], type_kv: int, *, encoder: bool) -> Array:
        c, n = self.c, len(ids)
        model = self.load(path)
        p = c.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = N_CTX, 512, 512, 1
        p.n_threads = p.n_threads_batch = 1
        p.type_k = p.type_v = type_kv
        p.flash_attn_type = 0
        p.embeddings, p.pooling_type = encoder, 0 if encoder else -1
        context = c.llama_init_from_model(model, p)
        batch = c.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if not context or c.llama_decode(context, batch):
            raise RuntimeError("llama.cpp does not compute it")
        width = (
            c.llama_model_n_embd(model)
            if encoder
            else c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        )
        rows = (c.llama_get_embeddings if encoder else c.llama_get_logits)(context)
        return np.ctypeslib.as_array(rows, shape=(n, width)).copy()


def _deepen(spec: Spec) -> None:
    """Tensors of more layers, as those of the first ones; or without the last ones."""
    old, new = spec.pop("depths", (1, 1))
    named = {t[0]: t for t in spec["tensors"]}
    for i in range(old, new):
        for name, tensor in list(named.items()):
            if name.startswith(f"blk.{i % old}."):
                other = name.replace(f"blk.{i % old}.", f"blk.{i}.", 1)
                named.setdefault(other, [other, list(tensor[1]), tensor[2]])
    last = {f"blk.{i}." for i in range(new, old)}
    spec["tensors"] = [t for n, t in named.items() if not n.startswith(tuple(last or {"!"}))]


def vary_optional(oracle: Oracle, spec: Spec, path: Path, rng: Any, p: float) -> None:
    """Leave out, or add, some of the tensors that llama.cpp loads where they are there."""
    oracle.fits(spec, path)
    absent = oracle.asked() - {t[0] for t in spec["tensors"]}
    kinds = sorted({re.sub(r"^blk\.\d+\.", "", t[0]) for t in spec["tensors"]})
    for kind in kinds:
        if rng.random() >= p or not kind.endswith(("bias", "norm.weight", "output.weight")):
            continue
        kept = [t for t in spec["tensors"] if re.sub(r"^blk\.\d+\.", "", t[0]) != kind]
        other = spec | {"tensors": kept}
        write(other, path, None)
        model = oracle.load(path)
        if model:
            oracle.c.llama_model_free(model)
            spec["tensors"] = kept
    more = sorted({re.sub(r"^blk\.\d+\.", "", name) for name in absent})
    for kind in more:
        if rng.random() >= p or not kind.endswith(("bias", "output.weight", "q_norm.weight")):
            continue
        names = [n for n in absent if re.sub(r"^blk\.\d+\.", "", n) == kind]
        other = json.loads(json.dumps(spec))
        other["tensors"] += [[n, [1], 0] for n in names]
        if oracle.fits(other, path):
            spec["tensors"] = other["tensors"]


def write(spec: Spec, path: Path, seed: int | None) -> None:
    """The model of a spec; seed None: its tensors' bytes are not written."""
    writer = gguf.GGUFWriter(path, spec["arch"])
    for key, (types, value) in spec["kv"].items():
        element = gguf.GGUFValueType(types[1]) if len(types) == 2 else None
        writer.add_key_value(key, value, gguf.GGUFValueType(types[0]), element)
    kit_models._write_vocab(writer, kit_models._n_vocab(spec))
    if seed is not None:
        kit_models.SEED = seed
    size = 0
    for name, shape, type_ in spec["tensors"]:
        dtype = {0: np.float32, 1: np.float16, 26: np.int32}[type_]
        if seed is None:
            n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            writer.add_tensor_info(name, shape[::-1], np.dtype(dtype), n_bytes)
            size += -(-n_bytes // 32) * 32
            continue
        if dtype is np.int32:
            writer.add_tensor(name, kit_models._experts_of_tokens(spec, name, shape))
            continue
        values = kit_models._values(name, shape)
        for end, factor in spec.get("scaled", {}).items():
            if name.endswith(end):
                values = (values * np.float32(factor)).astype(np.float32)
        writer.add_tensor(name, values.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if seed is None:
        writer.write_ti_data_to_file()
        writer.close()
        os.truncate(path, (path.stat().st_size + 31) // 32 * 32 + size)
    else:
        writer.write_tensors_to_file()
        writer.close()


# --- Both --------------------------------------------------------------------------------------


def apart(work: Callable[[], Any], seconds: int) -> str:
    """Run in a process of its own, which may abort; "" where it went well, else why not."""
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            import signal

            signal.alarm(seconds)
            for out in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), out)
            try:
                work()
                code = 0
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                at = f"{Path(where.filename).name}:{where.lineno}"
                said.write(f"{type(error).__name__}: {error} [{at}]")
                said.flush()
                code = 1
            os._exit(code)
        status = os.waitpid(pid, 0)[1]
        said.seek(0)
        return said.read() or (f"ended with status {status}" if status else "")


def draw(name: str, seed: int, folder: Path) -> bool:
    """Write folder/name.json, .npy: a spec that llama.cpp runs, and its logits."""
    spec = kit_models.specs()[name]
    for i in range(N_TRY):
        boldness = max(0.9 * (1 - i / N_TRY), 0.15)

        def work(i: int = i, boldness: float = boldness) -> None:
            oracle, path = Oracle(), folder / f"{name}.gguf"
            mutation = Mutation(spec, f"{seed}:{name}:{i}", boldness)
            new = mutation.drawn()
            if not oracle.fits(new, path):
                raise RuntimeError(oracle.said.strip().splitlines()[-3:])
            vary_optional(oracle, new, path, mutation.rng, boldness / 3)
            write(new, path, seed)
            found = oracle.logits(path, ids_of(new, seed), encoder="encoder" in spec)
            if not np.isfinite(found).all() or found.std() < 1e-6:
                raise RuntimeError("not finite")
            np.save(folder / f"{name}.npy", found)
            (folder / f"{name}.json").write_text(json.dumps(new | {"seed": seed}))

        if not apart(work, 60):
            return True
    return False


def ids_of(spec: Spec, seed: int) -> list[int]:
    kit_models.SEED = seed
    uniform = kit_models._uniform("ids", kit_models.N_TOK, np.float64)
    return (3 + uniform * (kit_models._n_vocab(spec) - 3)).astype(int).tolist()


def compare(name: str, folder: Path, hows: list[str]) -> dict[str, str]:
    """What differs, by the way it was read."""
    spec, expected = (
        json.loads((folder / f"{name}.json").read_text()),
        np.load(folder / f"{name}.npy"),
    )
    path, found = folder / f"{name}.gguf", {}
    write(spec, path, spec["seed"])
    ids = ids_of(spec, spec["seed"])
    engine = Engine.load(path, n_threads=1)
    for how in ["encoder"] if "encoder" in spec else hows:
        try:
            if how == "encoder":
                rows = engine.session(n_ctx=128).embed(ids, "none")
            else:
                rows = kit_runs.run(engine, ids, how, folder)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found[how] = (
                f"{type(error).__name__}: {error} [{Path(where.filename).name}:{where.lineno}]"
            )
            continue
        wanted = expected[:, 40:52] if how == "batch" else expected[:, -len(rows) :]
        # Where the bits of float16 choose an expert, llama.cpp's logits depend on them, too.
        bad = np.logical_and(*(kit_runs.far_off(rows, each) for each in wanted))
        most = len(bad) // 2 if "ffn_gate_inp" in json.dumps(spec["tensors"]) else 0
        if bad.sum() > most or not np.isfinite(rows).all():
            found[how] = f"{bad.sum()} of {len(bad)} positions differ, first {np.argmax(bad)}"
    engine.close()
    return found


def n_agreeing(name: str, folder: Path, hows: list[str], seeds: range) -> int:
    """With how many other draws of the weights the same shape agrees.

    Of a mixture, rounding chooses among nearly equal experts: one draw may differ, not most.
    """
    spec, other = json.loads((folder / f"{name}.json").read_text()), f"{name}-again"
    path = folder / f"{other}.gguf"

    def work(seed: int) -> None:
        write(spec, path, seed)
        (folder / f"{other}.json").write_text(json.dumps(spec | {"seed": seed}))
        ids = ids_of(spec, seed)
        np.save(folder / f"{other}.npy", Oracle().logits(path, ids, encoder="encoder" in spec))
        if found := compare(other, folder, hows):
            raise AssertionError(json.dumps(found))

    agreeing = [not apart(lambda seed=seed: work(seed), 540) for seed in seeds]
    for end in ("gguf", "json", "npy"):
        (folder / f"{other}.{end}").unlink(missing_ok=True)
    return sum(agreeing)


def shape_of(name: str, folder: Path) -> str:
    """What differs from the kit's model."""
    old, new = kit_models.specs()[name], json.loads((folder / f"{name}.json").read_text())
    kv = {k.removeprefix(old["arch"] + "."): v for k, v in new["kv"].items() if old["kv"][k] != v}
    keys = " ".join(f"{k}={v[1]}" for k, v in kv.items())
    label = lambda s: {re.sub(r"^blk\.\d+\.", "", t[0]) for t in s["tensors"]}  # noqa: E731
    return f"{keys} +{sorted(label(new) - label(old))} -{sorted(label(old) - label(new))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--folder", type=Path, help="with --again: of the specs that were drawn")
    parser.add_argument("--how", default="whole,chunks,steps,saved,batch")
    parser.add_argument("--again", action="store_true", help="read the specs of the folder")
    args = parser.parse_args()
    # A name that nobody can foresee, and make a link.
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="fresh-shapes-"))
    print(args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or sorted(kit_models.specs()):
        if not args.again and not draw(name, args.seed, args.folder):
            print(f"{name}: llama.cpp runs none of {N_TRY} mutations", flush=True)
            continue

        def work(name: str = name) -> None:
            if found := compare(name, args.folder, args.how.split(",")):
                raise AssertionError(json.dumps(found))

        said = apart(work, 540)
        print(f"{name}: {said or 'ok'}", flush=True)
        if said and name.endswith("-moe"):
            seeds = range(args.seed + 1, args.seed + 6)
            n = n_agreeing(name, args.folder, args.how.split(","), seeds)
            print(f"    of {len(seeds)} other draws of its weights {n} agree", flush=True)
        if said:
            print(f"    {shape_of(name, args.folder)}", flush=True)
        (args.folder / f"{name}.gguf").unlink()


if __name__ == "__main__":
    main()
