"""Coverage-guided fuzzing of the readers of files and texts, with atheris (libFuzzer).

`python -m tamis.tools.fuzz html --minutes 10` starts from the target's seeds and the corpus, with
another random seed each time; an input that is a finding is written to the folder of --findings,
and with --grow one that reaches new code is kept for the next run. atheris keeps arrays that the
watched code compares, so that memory grows (template: 5 KB an input): several runs of ten minutes
find more than one of an hour, which would run out of memory. Needs `pip install "tamis[fuzz]"`.
"""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

NAMES = (
    "gguf", "text", "template", "gbnf", "regex", "schema", "session", "cache", "kv", "html",
    "document", "http", "attn", "adapter", "control", "prepared", "batch", "shipped", "jinja",
    "page", "calls",
)  # fmt: skip
READERS = ["tamis", "pypdf", "jinja2", "llguidance"]
MEMORY_MIB = 4096
SECONDS = 20  # that an input may take, by the clock


def main() -> None:
    """Fuzz one target; ends with a status other than 0 at the first finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, help="of the random numbers; another each time")
    parser.add_argument("--corpus", type=Path, help="a folder of inputs to start from")
    parser.add_argument(
        "--findings", type=Path, default=Path(), help="a folder for what was found; made if missing"
    )
    parser.add_argument("--grow", type=Path, help="a folder where inputs that reach new code go")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="that an input may take")
    arguments = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit('fuzzing needs atheris: pip install "tamis[fuzz]"')
    # Only the readers are watched: branches of NumPy and Numba are irrelevant.
    with atheris.instrument_imports(include=READERS):
        from tamis.tools import fuzz_targets

        fuzz_targets.grammars()
    # without the folder libFuzzer ends with status 0
    arguments.findings.mkdir(parents=True, exist_ok=True)
    target, seed = fuzz_targets.TARGETS[arguments.name], arguments.seed or secrets.randbits(31)
    with tempfile.TemporaryDirectory(prefix="tamis-corpus-") as folder:
        for i, data in enumerate(fuzz_targets.seeds(arguments.name)):
            (Path(folder) / f"seed{i}").write_bytes(data)
            target(data)  # compiles missing kernels, which would count as a slow input
        more = [] if arguments.corpus is None else [arguments.corpus / arguments.name]
        first = Path(folder)
        if arguments.grow is not None:  # libFuzzer writes to the first of its folders
            first, more = arguments.grow / arguments.name, [*more, Path(folder)]
            first.mkdir(parents=True, exist_ok=True)
        options = [
            f"-max_total_time={round(60 * arguments.minutes)}",
            f"-seed={seed}",
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-timeout={arguments.seconds}",
            f"-artifact_prefix={arguments.findings}/{arguments.name}-",
            "-max_len=300000",
        ]
        print(f"{arguments.name}: seed {seed}")
        atheris.Setup(
            [sys.argv[0], *options, *(str(path) for path in [first, *more] if path.is_dir())],
            target,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
