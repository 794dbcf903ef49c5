"""Conformance on fresh shapes, by hand: `python tests/graph/fresh_shapes.py [NAME ...] --seeds 20`.

Each of the kit's models is given other widths, heads, depths, experts and indexers, and other
optional tensors (support/shape_mutation.py). llama.cpp (of the package xllamacpp, or
llama-cpp-python) says which tensors such a shape asks for, by what it misses or refuses while it
loads; a mutation that it refuses altogether is drawn again. Then both read the same ids, tamis
whole, in chunks and token by token. The folder keeps each model's spec, llama.cpp's logits and a
line of results.jsonl, from which the run goes on; `--table` prints what is there, model by model,
and `--again` reads the specs of the folder instead of drawing others. `--set KEY=JSON` gives keys
these values and draws nothing; `--keep NEW` makes what was compared one of the kit's models, which
test_conformance.py then reads.
"""

import argparse
import gzip
import json
import os
import re
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import kit_models
import kit_runs
from llama_oracle import Oracle
from shape_mutation import Mutation, Spec

from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFError

N_TRY, N_FIT = 40, 400
N_SETTLE = 4  # other draws of the weights, where rounding may have chosen an expert or a key
DTYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 26: np.dtype(np.int32)}
Array = np.ndarray[Any, Any]


# --- The tensors that llama.cpp asks for -------------------------------------------------------


def kind_of(name: str) -> str:
    """A tensor's name without its layer."""
    return re.sub(r"^blk\.\d+\.", "", name)


class Fitting:
    """Changes a spec's tensors until llama.cpp loads the file; their bytes are not written."""

    def __init__(self, oracle: Oracle, spec: Spec, path: Path) -> None:
        self.oracle, self.spec, self._path = oracle, spec, path
        deepen(spec)
        writer = _begun(spec, path)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        self._keys = path.read_bytes()

    def fits(self) -> bool:
        """Change the tensors to those that the keys ask for; False where that fails."""
        for _ in range(N_FIT):
            if self.loads():
                return True
            if not self._mend():
                return False
        return False

    def loads(self, tensors: list[Any] | None = None) -> bool:
        """Whether llama.cpp loads the file with these tensors, the spec's by default."""
        tensors = self.spec["tensors"] if tensors is None else tensors
        keys, infos, at = self._keys, [], 0
        for name, shape, type_ in tensors:
            text = name.encode()
            infos.append(struct.pack("<Q", len(text)) + text + struct.pack("<I", len(shape)))
            infos.append(struct.pack(f"<{len(shape)}QIQ", *shape, type_, at))
            at += -(-int(np.prod(shape)) * DTYPES[type_].itemsize // 32) * 32
        head = keys[:8] + struct.pack("<Q", len(tensors)) + keys[16:] + b"".join(infos)
        self._path.write_bytes(head)
        os.truncate(self._path, -(-len(head) // 32) * 32 + at)
        return self.oracle.loads(self._path)

    def _mend(self) -> bool:
        tensors, said = self.spec["tensors"], self.oracle.said
        shape = re.search(r"tensor '(\S+)' has wrong shape; expected \[?([\d, ]+)\]?, got", said)
        if shape:
            self._reshape(shape[1], [int(n) for n in shape[2].split(",") if n.strip()])
            return True
        missing = re.search(r"missing tensor '(\S+)'|tensor '(\S+)' not found", said)
        if missing:
            name = missing[1] or missing[2]
            known = (t for t in tensors if kind_of(t[0]) == kind_of(name))
            like = next(known, [name, [1], 0])
            tensors.append([name, list(like[1]), like[2]])
            return True
        if "wrong number of tensors" in said:
            loaded = self.asked()
            left = [t for t in tensors if t[0] in loaded]
            self.spec["tensors"], changed = left, len(left) < len(tensors)
            return changed
        return False

    def _reshape(self, name: str, shape: list[int]) -> None:
        """Of this tensor, and of those of later layers that were like it."""
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        tensors = self.spec["tensors"]
        first = next(t for t in tensors if t[0] == name)
        old, layer = list(first[1]), _layer_of(name)
        for tensor in tensors:
            same = kind_of(tensor[0]) == kind_of(name) and tensor[1] == old
            if same and _layer_of(tensor[0]) >= layer:
                tensor[1] = list(shape)

    def asked(self) -> set[str]:
        """Names of the tensors that the last load looked for."""
        return set(re.findall(r"loading tensor (\S+)", self.oracle.said))

    def shares(self, kinds: set[str]) -> bool:
        """Whether it loads with a shared expert beside those of each layer, where kinds has one.

        llama.cpp misses none of some architectures', and then computes what no model has.
        """
        tensors = self.spec["tensors"]
        named = {t[0] for t in tensors}
        for kind in sorted(k for k in kinds if k.endswith("shexp.weight")):
            routed = (n for n in sorted(named) if kind_of(n) == "ffn_gate_inp.weight")
            wanted = (n.replace("ffn_gate_inp.weight", kind) for n in routed)
            tensors += [[n, [1], 0] for n in wanted if n not in named]
        return self.fits()

    def vary_optional(self, rng: np.random.Generator, p: float) -> None:
        """Leave out, or add, some of the tensors that llama.cpp loads where they are there."""
        self.loads()
        spec = self.spec
        absent = self.asked() - {t[0] for t in spec["tensors"]}
        for kind in sorted({kind_of(t[0]) for t in spec["tensors"]}):
            if rng.random() >= p or not kind.endswith(("bias", "norm.weight", "output.weight")):
                continue
            kept = [t for t in spec["tensors"] if kind_of(t[0]) != kind]
            if self.loads(kept):
                spec["tensors"] = kept
        for kind in sorted({kind_of(name) for name in absent}):
            if rng.random() >= p or not kind.endswith(("bias", "output.weight", "q_norm.weight")):
                continue
            before = json.loads(json.dumps(spec["tensors"]))
            spec["tensors"] += [[n, [1], 0] for n in sorted(absent) if kind_of(n) == kind]
            if not self.fits():
                spec["tensors"] = before


def _layer_of(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else 0


def deepen(spec: Spec) -> None:
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


def _begun(spec: Spec, path: Path) -> gguf.GGUFWriter:
    """A file with the spec's keys and a vocabulary."""
    writer = gguf.GGUFWriter(path, spec["arch"])
    for key, (types, value) in spec["kv"].items():
        element = gguf.GGUFValueType(types[1]) if len(types) == 2 else None
        writer.add_key_value(key, value, gguf.GGUFValueType(types[0]), element)
    kit_models._write_vocab(writer, kit_models._n_vocab(spec))
    return writer


def write(spec: Spec, path: Path, seed: int) -> None:
    """Write the model of a spec, its weights drawn from a seed."""
    kit_models.SEED = seed
    writer = _begun(spec, path)
    for name, shape, type_ in spec["tensors"]:
        if DTYPES[type_] == np.int32:
            writer.add_tensor(name, kit_models._experts_of_tokens(spec, name, shape))
            continue
        values = kit_models._values(name, shape)
        for end, factor in spec.get("scaled", {}).items():
            if name.endswith(end):
                values = (values * np.float32(factor)).astype(np.float32)
        writer.add_tensor(name, values.astype(DTYPES[type_]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
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
                said.write(_told(error))
                said.flush()
                code = 1
            os._exit(code)
        status = os.waitpid(pid, 0)[1]
        said.seek(0)
        return said.read() or (f"ended with status {status}" if status else "")


def _told(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} [{Path(where.filename).name}:{where.lineno}]"


class Fresh:
    """One model of another shape: its spec, llama.cpp's logits, and how tamis compares."""

    def __init__(
        self, name: str, seed: int, folder: Path, values: dict[str, Any] | None = None
    ) -> None:
        self.name, self.seed, self._values = name, seed, values or {}
        self.path = folder / f"{name}-{seed}.gguf"
        self._old = kit_models.specs()[name]

    @property
    def encoder(self) -> bool:
        """It gives rows, no logits."""
        return "encoder" in self._old

    @property
    def spec(self) -> Spec:
        """The spec that was drawn."""
        found: Spec = json.loads(self.path.with_suffix(".json").read_text())
        return found

    def draw(self) -> bool:
        """Keep a spec that llama.cpp runs, and its logits; False where it runs none."""
        at = self.path.with_suffix(".try")
        first = 0
        while first < N_TRY:
            at.write_text(str(first))
            if not apart(lambda first=first: self._try(range(first, N_TRY), at), 120):
                break
            first = int(at.read_text()) + 1  # llama.cpp aborted on this one
        at.unlink()
        return first < N_TRY

    def _try(self, attempts: range, at: Path) -> None:
        oracle = Oracle()
        for i in attempts:
            at.write_text(str(i))
            boldness = max(0.9 * (1 - i / N_TRY), 0.15)
            mutation = Mutation(self._old, f"{self.seed}:{self.name}:{i}", boldness)
            values = self._values
            spec = mutation.changed(values) if values else mutation.drawn()
            fitting = Fitting(oracle, spec, self.path)
            if not fitting.fits() or not fitting.shares(
                {kind_of(t[0]) for t in self._old["tensors"]}
            ):
                continue
            if not values:
                fitting.vary_optional(mutation.rng, boldness / 3)
            if self._ask(oracle, fitting.spec, self.seed):
                self.path.with_suffix(".json").write_text(json.dumps(fitting.spec))
                return
        raise RuntimeError("llama.cpp runs none")

    def _ask(self, oracle: Oracle, spec: Spec, seed: int) -> bool:
        """Keep llama.cpp's logits with a KV cache of float32 and of float16, where it has some."""
        write(spec, self.path, seed)
        flash = spec["arch"] == "minimax-m3"  # without, it attends to everything
        ids = ids_of(spec, seed)
        found = oracle.logits(self.path, ids, encoder=self.encoder, flash=flash)
        if not np.isfinite(found).all() or found.std() < 1e-6:
            return False
        np.save(self.path.with_suffix(".npy"), found.astype(np.float32))
        return True

    def compare(self, hows: list[str]) -> dict[str, Any]:
        """The result: agrees, refused with the reason, or differs, and each way's errors."""
        found, tensors = self._compare(hows, self.seed), json.dumps(self.spec["tensors"])
        choices = "ffn_gate_inp" in tensors or "indexer" in tensors
        if found["status"] == "differs" and "why" not in found and choices:
            # Rounding may have chosen among nearly equal experts or keys: other weights settle it.
            draws = [self._again(hows, self.seed + 1000 * i) for i in range(1, N_SETTLE + 1)]
            found["draws"] = [(draw["n_bad"], draw.get("n_own", 0)) for draw in draws]
            n_bad, n_own = np.sum([*found["draws"], (found["n_bad"], found["n_own"])], axis=0)
            if not min(found["draws"])[0] or n_bad <= n_own:
                found["status"] = "agrees"
        return found | {"name": self.name, "seed": self.seed, "shape": self.shape()}

    def _again(self, hows: list[str], seed: int) -> dict[str, Any]:
        if not self._ask(Oracle(), self.spec, seed):
            return {"n_bad": kit_models.N_TOK}
        return self._compare(hows, seed)

    def _compare(self, hows: list[str], seed: int) -> dict[str, Any]:
        spec, expected = self.spec, np.load(self.path.with_suffix(".npy"))
        write(spec, self.path, seed)
        ids = ids_of(spec, seed)
        try:
            engine = Engine.load(self.path, n_threads=1)
        except GGUFError as error:
            return {"status": "refused", "why": str(error), "n_bad": 0}
        # How often llama.cpp's two caches lead it to other logits.
        n_own = int(kit_runs.far_off(expected[0], expected[1]).sum())
        result: dict[str, Any] = {"status": "agrees", "n_bad": 0, "n_own": n_own, "nmse": {}}
        for how in ["rows"] if self.encoder else hows:
            try:
                if how == "rows":
                    rows = engine.session(n_ctx=128).embed(ids, "none")
                else:
                    rows = kit_runs.run(engine, ids, how, self.path.parent)
            except Exception as error:
                result |= {"status": "differs", "why": f"{how}: {_told(error)}"}
                continue
            wanted = expected[:, 40:52] if how == "batch" else expected[:, -len(rows) :]
            # Where the bits of float16 choose an expert, llama.cpp's logits depend on them, too.
            error = np.min([kit_runs.nmse(rows, each) for each in wanted], axis=0)
            result["nmse"][how] = [float(f"{e:.1e}") for e in error]
            n_bad = int((~(error <= kit_runs.MOST)).sum())
            result["n_bad"] = max(result["n_bad"], n_bad)
        if result["n_bad"]:
            result["status"] = "differs"
        engine.close()
        return result

    def keep(self, name: str) -> None:
        """Add it to the kit's models, with weights as theirs."""
        if not self._ask(Oracle(), self.spec, 7):
            raise SystemExit("llama.cpp gives no logits of it with the kit's weights")
        found = np.load(self.path.with_suffix(".npy"))[0].astype(np.float16)
        specs, logits = (
            kit_models.FOLDER / f"fresh_{name}" for name in ("specs.json.gz", "logits.npz")
        )
        kept = json.loads(gzip.decompress(specs.read_bytes())) if specs.exists() else {}
        with gzip.GzipFile(specs, "wb", mtime=0) as out:
            out.write(json.dumps(kept | {name: self.spec}, separators=(",", ":")).encode())
        others = dict(np.load(logits)) if logits.exists() else {}
        np.savez_compressed(logits, **(others | {name: found}))

    def shape(self) -> str:
        """What differs from the kit's model."""
        old, new = self._old, self.spec
        kv = {k.removeprefix(old["arch"] + "."): v for k, v in new["kv"].items()}
        was = {k.removeprefix(old["arch"] + "."): v for k, v in old["kv"].items()}
        keys = " ".join(f"{k}={v[1]}" for k, v in kv.items() if was[k] != v)
        kinds = [{kind_of(t[0]) for t in spec["tensors"]} for spec in (old, new)]
        return f"{keys} +{sorted(kinds[1] - kinds[0])} -{sorted(kinds[0] - kinds[1])}"


def ids_of(spec: Spec, seed: int) -> list[int]:
    """The tokens that both read."""
    kit_models.SEED = seed
    uniform = kit_models._uniform("ids", kit_models.N_TOK, np.float64)
    return (3 + uniform * (kit_models._n_vocab(spec) - 3)).astype(int).tolist()


def result_of(fresh: Fresh, args: argparse.Namespace) -> dict[str, Any]:
    """Draw, unless the folder's spec is to be read again, and compare."""
    about = {"name": fresh.name, "seed": fresh.seed}
    if not args.again and not fresh.draw():
        return about | {"status": "none", "why": f"llama.cpp runs none of {N_TRY} mutations"}
    kept = fresh.path.with_suffix(".result")

    def work() -> None:
        kept.write_text(json.dumps(fresh.compare(args.how.split(","))))

    said = apart(work, 540)
    fresh.path.with_suffix(".gguf").unlink(missing_ok=True)
    if said:
        return about | {"status": "differs", "why": said, "shape": fresh.shape()}
    found: dict[str, Any] = json.loads(kept.read_text())
    kept.unlink()
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Of each model how many seeds agree, are refused and differ, and why."""
    rows = ["| model | agree | refused | differ | why |", "| --- | --- | --- | --- | --- |"]
    for name in sorted({line["name"] for line in lines}):
        of = {line["seed"]: line for line in lines if line["name"] == name}.values()
        n = Counter(line["status"] for line in of)
        why = Counter(re.sub(r"^.*?: (?=\S+ is )", "", line["why"]) for line in of if "why" in line)
        told = "; ".join(f"{text} ({count})" for text, count in why.most_common(3))
        rows.append(f"| `{name}` | {n['agrees']} | {n['refused']} | {n['differs']} | {told} |")
    return "\n".join(rows)


def main() -> None:
    """Compare the models that the command line names, or print what is known of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=101, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--folder", type=Path, help="where the run goes on; else a new one")
    parser.add_argument("--how", default="whole,chunks,steps", help="also: saved,batch")
    parser.add_argument("--again", action="store_true", help="read the specs of the folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--keep", metavar="NEW", help="among the kit's models")
    parser.add_argument("--table", action="store_true", help="print what the folder has")
    args = parser.parse_args()
    # A name that nobody can foresee, and make a link.
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="fresh-shapes-"))
    print(args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "results.jsonl"
    lines = [json.loads(line) for line in results.open()] if results.exists() else []
    if args.table:
        print(table(lines))
        return
    asked = args.again or args.set
    done = set() if asked else {(line["name"], line["seed"]) for line in lines}
    values = {
        key: json.loads(value) for key, _, value in (each.partition("=") for each in args.set)
    }
    specs = kit_models.specs()
    names = args.names or sorted(name for name in specs if not specs[name].get("pooling"))
    for seed in range(args.seed, args.seed + args.seeds):
        for name in names:
            if (name, seed) in done:
                continue
            fresh = Fresh(name, seed, args.folder, values)
            line = result_of(fresh, args)
            with results.open("a") as out:
                out.write(json.dumps(line) + "\n")
            said = line.get("why") or line.get("n_bad")
            print(f"{name} {seed}: {line['status']} {said or ''}", flush=True)
            if args.keep:
                fresh.keep(args.keep)


if __name__ == "__main__":
    main()
