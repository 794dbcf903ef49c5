"""What commands share: arguments, input, progress on standard error, loading a model."""

import argparse
import contextlib
import math
import re
import select
import sys
from pathlib import Path
from typing import Any

from tamis.cli.options import group
from tamis.cli.options.errors import UsageError, address
from tamis.cli.terminal import say
from tamis.cli.terminal.progress import MIB as MIB
from tamis.cli.terminal.progress import Progress
from tamis.jit_kernels.backends import DEVICES, device_for, on_host

PATIENCE = 2.0  # seconds until a command says that it waits for standard input
# The groups of the help.
# Of a model's name, in help.
DEFAULT = "(default: the only model in the model folder, else qwen2.5-coder-0.5b or smollm2)"
MODEL_GROUP, KV_GROUP = "model and device", "context and KV cache"
ATTENTION_GROUP, ADAPTER_GROUP = "attention", "adapters"
# Copies of KV_TYPES in jit_kernels/contract/types.py, UNITS and UNIT in kv/types.py, which need
# NumPy.
CACHE_TYPES, KV_UNITS, KV_UNIT = ("f16", "q8_0", "q4_0"), (1, 16, 64), 16


def count(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    return _whole(text, least=1)


def count_or_zero(text: str) -> int:
    """An argument that is a whole number of at least 0."""
    return _whole(text, least=0)


def whole(text: str) -> int:
    """An argument that is a whole number; all negative ones mean the same."""
    return _whole(text, least=-(1 << 31))


def number(text: str) -> float:
    """An argument that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def port(text: str) -> int:
    """An argument that is a TCP port, or 0."""
    value = count_or_zero(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no TCP port: expected 0 to 65535")
    return value


def context(text: str) -> int | None:
    """The argument of --ctx: at least 1, auto (None), or 0 for the training context."""
    if text == "auto":
        return None
    try:
        return count_or_zero(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from None


def answer_length(text: str) -> int:
    """The argument of -n: at least 1, or -1 for no limit."""
    if text in ("-1", "-2"):
        return -1
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or -1 for no limit") from None


def counts(text: str) -> list[int]:
    """An argument such as 1,2,4: whole numbers of at least 1."""
    return [count(item) for item in text.split(",")]


def counts_or_zero(text: str) -> list[int]:
    """An argument such as 0,512: whole numbers of at least 0."""
    return [count_or_zero(item) for item in text.split(",")]


def text(argument: str) -> str:
    """A text argument that the model reads."""
    if wrong := not_utf8(argument):
        raise argparse.ArgumentTypeError(wrong)
    return argument


def not_utf8(text: str) -> str:
    """The error in a text of the command line or of standard input that is not UTF-8; "" if none.

    Python represents invalid bytes there as surrogates, U+DC80 to U+DCFF.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = len(text[: error.start].encode())
        return f"not UTF-8: byte {ord(text[error.start]) & 0xFF:#04x} at {at}; convert it first"
    return ""


def share(text: str) -> float:
    """An argument that is a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def size(text: str) -> int:
    """An argument such as 512MiB, 1.5GiB or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?)?B?", text.strip(), re.IGNORECASE)
    n = 0.0
    if found is not None:
        n = float(found[1]) * 1024 ** " KMGT".index((found[2] or " ").upper())
    if not 1 <= n < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1GiB")
    return int(n)


def cache_size(text: str) -> int:
    """An argument that is a size of at least 1 MiB, or 0 for no cache."""
    n = 0 if text.strip() == "0" else size(text)
    if 0 < n < 1 << 20:  # llama.cpp's flag of this name counts MiB
        raise argparse.ArgumentTypeError(f"{text!r} is {n} bytes: write {n}MiB, or 0 for none")
    return n


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        at_least = f" of at least {least}" if least >= 0 else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{at_least}")
    return value


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    threads: bool = True,
    several: bool = False,
    auto: bool = False,
    lengths: bool = False,
    shared: bool = False,
) -> None:
    """Add -m, -c, -ctk, -ctv, --device, -ngl, -nkvo, --attn, --prefill and possibly -t.

    several: --attn is a list. lengths: --prefill is a list, too, and lengths replace -c. auto:
    context, KV types and --prefill are chosen automatically; their defaults are then None, None and
    "auto". shared: prompts share their computed prefixes, and --prefill is "auto", too.
    """
    model = group(parser, MODEL_GROUP)
    model.add_argument(
        "-m",
        "--model",
        help=f"path or short name of the model, a GGUF file {DEFAULT}",
    )
    if threads:
        model.add_argument(
            "-t", "--threads", type=count, help="number of CPU threads (default: all cores)"
        )
    _add_device_arguments(model)
    _add_weight_arguments(model)
    if auto or not lengths:
        _add_ctx_argument(parser, auto=auto)
    kv = group(parser, KV_GROUP)
    for short, name, what in (("k", "type-k", "keys"), ("v", "type-v", "values")):
        kv.add_argument(
            f"-ct{short}",
            f"--cache-{name}",
            choices=CACHE_TYPES,
            default=None if auto else "f16",
            help=f"type in which {what} are stored (default: "
            f"{'f16, or q8_0 if f16 does not fit in memory' if auto else 'f16'})",
        )
    beyond = "dense up to position 8192" if shared else "dense up to 8192 tokens" * auto
    _add_method_arguments(parser, several=several, auto=beyond, lengths=lengths)


def add_making_arguments(parser: argparse.ArgumentParser) -> None:
    """Add -t and --json of the commands that write a model's file."""
    parser.add_argument("-t", "--threads", type=count, help="CPU threads (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_device_arguments(model: Any) -> None:
    model.add_argument(
        "--device",
        choices=DEVICES,
        help="device that runs the model (default: cpu, or cuda with -ngl)",
    )
    model.add_argument(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        type=whole,
        metavar="N",
        help="number of layers, counted from the last one, that run on the GPU; the other layers "
        "and the output run on the CPU. -1, or more than the model has: all layers and the "
        "output (default: -1 with --device cuda, else 0)",
    )
    model.add_argument(
        "-nkvo",
        "--no-kv-offload",
        action="store_true",
        help="keep the KV cache and attention on the CPU while layers run on the GPU, for contexts "
        "that do not fit the GPU's memory; has no effect without a GPU",
    )


def _add_weight_arguments(model: Any) -> None:
    model.add_argument(
        "--precision",
        choices=("fast", "exact"),
        default="fast",
        help="activations of a prompt on the CPU. fast: 8 bits, with outliers in float32, closer "
        "to exact logits than llama.cpp's; exact: 14 bits (default: fast)",
    )
    model.add_argument(
        "--no-prepare",
        action="store_true",
        help="do not store repacked weights on disk (a copy of a large model's weights that later "
        "loads map at once)",
    )
    model.add_argument(
        "--prepare-dir",
        metavar="DIR",
        help="folder for repacked weights (default: in the user's cache folder, see `tamis cache`)",
    )
    model.add_argument(
        "--prepare-max",
        type=size,
        metavar="SIZE",
        help="most disk space for repacked weights; the least recently used copies are removed "
        "first (default: 64GiB)",
    )


def _add_method_arguments(
    parser: argparse.ArgumentParser, *, several: bool, auto: str, lengths: bool
) -> None:
    """Add --attn and --prefill.

    auto: the text that explains --prefill auto; "": it is not offered.
    """
    attention = group(parser, ATTENTION_GROUP)
    text = (
        "attention method of decode steps (see `tamis methods`), or your own: FILE.py:NAME, a "
        "file that is run"
    )
    if several:
        more = "; may be repeated (default: dense)"
        attention.add_argument("--attn", action="append", metavar="METHOD", help=text + more)
    else:
        more = (
            ". auto: dense up to a context of 12288 tokens, beyond that HiP with a floor under the "
            "retained attention mass of each head; dense: read all keys (default: auto)"
        )
        attention.add_argument("--attn", default="auto", metavar="METHOD", help=text + more)
    if not several:
        attention.add_argument(
            "--min-mass",
            type=share,
            metavar="P",
            help="least share of attention, 0 to 1, that each head must retain at every step: "
            "where "
            "sampled keys show that --attn selected too little, more keys are read. 0: only "
            "measure it (default: 0.95 with --attn auto, else off)",
        )
    text = "attention method of prompts (see `tamis methods`)"
    if lengths:
        more = "; may be repeated (default: dense)"
        attention.add_argument("--prefill", action="append", metavar="METHOD", help=text + more)
    elif auto:
        more = f". auto: {auto}, beyond that a window with Delta (default: auto)"
        attention.add_argument("--prefill", default="auto", metavar="METHOD", help=text + more)
    else:
        attention.add_argument(
            "--prefill", default="dense", metavar="METHOD", help=f"{text} (default: dense)"
        )


def _add_ctx_argument(parser: argparse.ArgumentParser, *, auto: bool) -> None:
    names = ("-c", "--ctx", "--ctx-size")
    kv = group(parser, KV_GROUP)
    if not auto:
        text = "context length in tokens (default: the trained length, at most 8192)"
        kv.add_argument(*names, type=count, metavar="N", help=text)
        return
    kv.add_argument(
        *names,
        type=context,
        metavar="N",
        help="context length in tokens. auto: as much as the prompt and the answer need, up to the "
        "trained length and to what fits in memory; 0: the trained length (default: auto)",
    )


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --kv-ram and --kv-dir."""
    group(parser, KV_GROUP).add_argument(
        "--kv-ram",
        type=size,
        metavar="SIZE",
        help="memory for the KV cache, such as 512MiB; the rest is kept in a file in --kv-dir "
        "(default: all of the KV cache is in memory)",
    )
    text = "folder for the file of --kv-ram, on a fast disk (default: none)"
    group(parser, KV_GROUP).add_argument("--kv-dir", metavar="DIR", help=text)


def add_vram_argument(parser: argparse.ArgumentParser) -> None:
    """Add --kv-vram."""
    group(parser, KV_GROUP).add_argument(
        "--kv-vram",
        type=size,
        metavar="SIZE",
        help="GPU memory for the KV cache, such as 4GiB; the whole cache is then kept in RAM, and "
        "the GPU fetches the pages that it reads (default: all of the KV cache is in GPU "
        "memory)",
    )


def add_unit_argument(parser: argparse.ArgumentParser) -> None:
    """Add --kv-unit."""
    group(parser, KV_GROUP).add_argument(
        "--kv-unit",
        type=int,
        choices=KV_UNITS,
        default=KV_UNIT,
        help=f"tokens of one KV head that are read from the file at once (default: {KV_UNIT})",
    )


def add_copy_argument(parser: argparse.ArgumentParser) -> None:
    """Add --key-copy."""
    group(parser, KV_GROUP).add_argument(
        "--key-copy",
        choices=("none", "4", "8"),
        help="bits of the copy of keys by which topk and cpe score them before they look at the "
        "best of the keys themselves; none: they read all keys (default: 4 on a GPU, 8 on the CPU, "
        "which has no other)",
    )


def add_context_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of long contexts: --kv-*, --key-copy, --rope-*, --yarn-orig-ctx."""
    add_kv_arguments(parser)
    add_unit_argument(parser)
    add_vram_argument(parser)
    add_copy_argument(parser)
    add_rope_arguments(parser)


def add_rope_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --rope-scaling, --rope-scale, --yarn-orig-ctx."""
    kv = group(parser, KV_GROUP)
    kv.add_argument(
        "--rope-scaling",
        choices=["none", "linear", "yarn"],
        help="scale positions to extend the context beyond the trained length (default: what the "
        "model file says)",
    )
    kv.add_argument(
        "--rope-scale",
        type=float,
        metavar="N",
        help="factor of --rope-scaling, at least 1 (default: 1)",
    )
    kv.add_argument(
        "--yarn-orig-ctx",
        type=count,
        metavar="N",
        help="trained context length in tokens, for --rope-scaling yarn (default: what the model "
        "file says)",
    )


def add_audit_argument(parser: argparse.ArgumentParser) -> None:
    """Add --audit and --audit-table."""
    attention = group(parser, ATTENTION_GROUP)
    attention.add_argument(
        "--audit-table",
        action="store_true",
        help="with --audit: a line for every layer and KV head, not for the worst five only",
    )
    attention.add_argument(
        "--audit",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="also compute dense attention on every N-th decode step and report the retained "
        "attention mass and the output error of --attn; 0: never. An N without a common "
        "factor with a method's refresh period covers all of its steps (default: 0)",
    )


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of LoRA adapters and control vectors."""
    adapters = group(parser, ADAPTER_GROUP)
    for flag, kind, text in (
        (
            "--lora",
            _scaled,
            "LoRA adapter in GGUF, multiplied by SCALE (default: 1); may be repeated",
        ),
        (
            "--control-vector",
            _scaled,
            "control vector in GGUF, multiplied by SCALE (default: 1); may be repeated",
        ),
        (
            "--control-vector-scaled",
            _scaled,
            "the same as --control-vector, under llama.cpp's name",
        ),
        ("--lora-scaled", _scaled, "the same as --lora, under llama.cpp's name"),
    ):
        adapters.add_argument(
            flag, action="append", default=[], type=kind, metavar="FILE[:SCALE]", help=text
        )
    adapters.add_argument(
        "--control-vector-layer-range",
        nargs=2,
        type=count,
        metavar=("FIRST", "LAST"),
        help="first and last layer, inclusive, to which control vectors are applied (default: all "
        "layers)",
    )


def _scaled(text: str) -> tuple[str, float]:
    """A file and its scale."""
    path, colon, scale = text.rpartition(":")
    try:
        found = float(scale) if colon else 1.0
    except ValueError:
        path, colon, found = text, "", 1.0  # the colon may be part of the name
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r} has a scale that is no finite number")
    return (path if colon else text), found


def adapter_files(arguments: argparse.Namespace) -> Any:
    """The AdapterFiles of the flags."""
    from tamis.engine.adapters import AdapterFiles

    def named(*flags: str) -> tuple[tuple[str, float], ...]:
        found = [one for flag in flags for one in getattr(arguments, flag, ())]
        return tuple((str(Path(path).absolute()), scale) for path, scale in found)

    layers = getattr(arguments, "control_vector_layer_range", None)
    return AdapterFiles(
        named("lora", "lora_scaled"),
        named("control_vector", "control_vector_scaled"),
        None if layers is None else tuple(layers),
    )


def check_methods(attn: str, prefill: str, flag: str = "--attn") -> None:
    """Raise UsageError for an unknown method, before a model is loaded for it.

    flag: the one that names the method of decode steps.
    """
    from tamis.select.notation import MethodError, parse_methods

    try:
        parse_methods(attn, prefill)
    except MethodError as error:
        raise UsageError(str(error).replace("attn takes", f"{flag} takes")) from error


def read_text(path: str) -> str:
    """The text of a file, or of standard input for "-".

    Raises OSError, ValueError if it is not UTF-8.
    """
    name = "standard input" if path == "-" else path
    try:
        data = standard_input() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte {data[error.start]:#04x} at {error.start}; convert it first"
        ) from error


def standard_input() -> bytes:
    """Standard input to its end; after two seconds without any, a note says what is waited for."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # a stand-in
        if not sys.stdin.isatty() and not select.select([sys.stdin], [], [], PATIENCE)[0]:
            say("waiting for standard input, an open pipe; < /dev/null says that there is none")
    return sys.stdin.buffer.read()


def check_is_file(name: str) -> None:
    """Raise UsageError for an address of the web in place of a file."""
    if text := address(name):
        raise UsageError(text)


def model_file(name: str | None, progress: Progress) -> Path:
    """The file of a model; without a name the only installed one, or the default one.

    If the default one is missing, it is fetched after a note; so is one with a short name, if
    somebody is at the terminal. Raises ModelError.
    """
    from tamis.fetch.registry import KNOWN, ModelError, default, resolve

    if name is not None:
        check_is_file(name)
        try:
            return resolve(name)
        except ModelError:
            at_terminal = sys.stdin.isatty() and sys.stderr.isatty()
            if name not in KNOWN or not at_terminal:
                raise
            return _fetched(name, "", progress)
    try:
        path = resolve(None)
    except ModelError:
        path = _fetched(default(), "no model named with -m: ", progress)
    else:
        if sys.stderr.isatty():
            say(f"no model named with -m: using {path.name}")
    return path


def _fetched(name: str, why: str, progress: Progress) -> Path:
    from tamis.fetch.registry import KNOWN, pull

    model = KNOWN[name]
    say(f"{why}fetching {name} ({model.n_bytes / 1e6:.0f} MB, {model.licence})")
    path = pull(name, progress=progress)
    progress.clear()
    return path


def load_engine(arguments: argparse.Namespace, progress: Progress, path: Path | None = None) -> Any:
    """The engine of -m, -t, --device, -ngl, -nkvo; --attn and --prefill are checked first.

    path: the file of -m, if it was found already.
    """
    from tamis.engine.engine import Engine

    attn = arguments.attn
    for method in [attn] if isinstance(attn, str) else attn:
        check_methods(method, arguments.prefill)
    where = devices(arguments)
    warn_of_threads(arguments.threads)
    path = path or model_file(arguments.model, progress)
    engine = Engine.load(
        path,
        n_threads=arguments.threads,
        rope=rope_scaling(arguments),
        mmproj=mmproj_file(arguments, path),
        progress=progress,
        **where,
    )
    progress.clear()
    return engine


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --mmproj and --image."""
    group(parser, MODEL_GROUP).add_argument(
        "-mm",
        "--mmproj",
        metavar="FILE",
        help="the model's encoder of pictures, a GGUF file (default: the file beside the model "
        "whose name has mmproj and the model's, once there is a picture)",
    )
    group(parser, "prompt").add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="a picture that the prompt begins with: PNG, JPEG, WebP, GIF (its first frame), BMP, "
        "PPM or TIFF; may be repeated (default: none)",
    )


def mmproj_file(arguments: argparse.Namespace, model: Path) -> Path | None:
    """The file of --mmproj, or with --image the one beside the model. Raises UsageError."""
    if (given := getattr(arguments, "mmproj", None)) is not None:
        return Path(given)
    asked = getattr(arguments, "image", None)
    if not asked and not getattr(arguments, "shows_pictures", False):
        return None
    from tamis.vision.beside import find_mmproj

    found = find_mmproj(model)
    if not asked:
        from tamis.vision.families.load import is_supported

        return found if found is not None and is_supported(found) else None
    if found is None:
        raise UsageError(
            f"there is no mmproj file beside {model.name}, which --image needs: name it with "
            "--mmproj"
        )
    return found


def marked(engine: Any, arguments: argparse.Namespace, text: str) -> str:
    """The text after the marks of the pictures of --image. Raises PictureError, OSError."""
    marks = [engine.picture_mark(Path(name)) for name in arguments.image]
    return "\n".join([*marks, text]) if marks else text


def warn_of_threads(n_thread: int | None) -> None:
    """Write a note if more threads are asked for than are used; see Engine.load."""
    from tamis.platform.processes import usable_cpus

    if n_thread is not None and n_thread > usable_cpus():
        n = usable_cpus()
        say(
            f"-t {n_thread}: this process may use {n} processor{'s' if n > 1 else ''}, and more "
            f"threads would wait for each other: {n} work{'s' if n == 1 else ''}"
        )


def devices(arguments: argparse.Namespace) -> dict[str, Any]:
    """Engine.load's arguments of devices, --precision and the prepare flags. Raises UsageError."""
    device, n = arguments.device, arguments.n_gpu_layers
    if device is not None and on_host(device) and n:
        raise UsageError(f"-ngl {n} puts layers on the GPU, --device {device} none: leave out one")
    if arguments.no_prepare and arguments.prepare_dir:
        raise UsageError("--no-prepare keeps nothing in --prepare-dir: leave out one of them")
    prepare: dict[str, Any] = {"prepare": not arguments.no_prepare}
    if arguments.prepare_dir is not None:  # a server's process has another working directory
        prepare["prepare"] = str(Path(arguments.prepare_dir).absolute())
    if arguments.prepare_max is not None:
        prepare["prepare_max"] = arguments.prepare_max
    return prepare | {
        "device": device or device_for(n),
        "n_gpu_layers": -1 if n is None else n,
        "offload_kqv": not arguments.no_kv_offload,
        "precision": arguments.precision,
    }


def rope_scaling(arguments: argparse.Namespace) -> Any:
    """The RopeScaling of the flags, None for the model's own. Raises UsageError."""
    from tamis.model.hparams import RopeScaling

    kind, factor = (getattr(arguments, name, None) for name in ("rope_scaling", "rope_scale"))
    n_ctx_orig = getattr(arguments, "yarn_orig_ctx", None)
    if kind in (None, "none"):
        if factor is not None or n_ctx_orig is not None:
            raise UsageError("--rope-scale and --yarn-orig-ctx need --rope-scaling linear or yarn")
        return None if kind is None else RopeScaling()
    if factor is None or not 1 <= factor < math.inf:
        raise UsageError(f"--rope-scaling {kind} needs --rope-scale N, a number of at least 1")
    return RopeScaling(kind=kind, factor=factor, n_ctx_orig=n_ctx_orig or 0)


def key_copy(arguments: argparse.Namespace) -> int | None:
    """The bits of --key-copy, None where it is not given."""
    given = getattr(arguments, "key_copy", None)
    return None if given is None else 0 if given == "none" else int(given)


def kv_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Types, tiers and folder of a session's KV cache, as far as the command has flags."""
    names = ("kv_ram", "kv_dir", "kv_unit", "kv_vram")
    where = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if getattr(arguments, "key_copy", None) is not None:
        where["key_copy"] = key_copy(arguments)
    return {"type_k": arguments.cache_type_k, "type_v": arguments.cache_type_v, **where}


def open_session(engine: Any, arguments: argparse.Namespace, progress: Progress) -> Any:
    """A session of --ctx, --attn and --prefill; missing kernels are compiled."""
    session = engine.session(
        n_ctx=arguments.ctx,
        attn=arguments.attn,
        prefill=arguments.prefill,
        audit=getattr(arguments, "audit", 0),
        adapters=adapter_files(arguments).load(),
        min_mass=getattr(arguments, "min_mass", None),
        progress=progress,
        **kv_options(arguments),
    )
    progress.clear()
    if session.loses_keys:
        say(
            "-ctk q4_0: the keys of this model have a bias that 4 bits do not hold on this device, "
            "and answers may be nonsense; use -ctk q8_0"
        )
    if arguments.attn == "auto" and not engine.auto_stays_dense():
        from tamis.select.auto import Auto

        floor = getattr(arguments, "min_mass", None)
        least = engine.auto_least(getattr(arguments, "kv_vram", None))
        floor = Auto.mass if floor is None else floor
        if session.n_ctx > least:
            say(
                f"--attn auto: beyond {least} tokens each head holds an estimated {floor:g} of "
                "attention; --attn dense reads all"
            )
    return session


def note_untrained(engine: Any, session: Any, arguments: argparse.Namespace) -> None:
    """Write a note if the context is longer than the (possibly stretched) training context."""
    n_trained = engine.hp.n_ctx_train
    if session.n_ctx > n_trained * (arguments.rope_scale or 1):
        say(
            f"the model was trained on {n_trained} tokens, the context has {session.n_ctx}: what "
            "it writes beyond may be nonsense; --rope-scaling yarn stretches its positions"
        )
