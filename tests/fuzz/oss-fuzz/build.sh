#!/bin/bash -eu
# Builds every target of tools/fuzz.py for OSS-Fuzz: a program a target, and its corpus.
python3 -m pip install ".[fuzz,grammar,pdf,server]"
for name in gguf text template gbnf regex schema session cache kv html document http attn; do
  cat > "$SRC/fuzz_$name.py" <<PROGRAM
import sys
import atheris
with atheris.instrument_imports(include=["tamis", "html", "_markupbase", "pypdf", "jinja2"]):
    from tamis.tools import fuzz_targets
atheris.Setup(sys.argv, fuzz_targets.TARGETS["$name"])
atheris.Fuzz()
PROGRAM
  compile_python_fuzzer "$SRC/fuzz_$name.py" --collect-all tamis
  python3 - "$name" "$SRC/corpus_$name" <<'SEEDS'
import sys
from pathlib import Path
from tamis.tools import fuzz_targets
folder = Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
for i, data in enumerate(fuzz_targets.seeds(sys.argv[1])):
    (folder / f"seed{i}").write_bytes(data)
SEEDS
  cp -r tests/fuzz/corpus/"$name"/. "$SRC/corpus_$name" 2> /dev/null || true
  (cd "$SRC/corpus_$name" && zip -q -r "$OUT/fuzz_${name}_seed_corpus.zip" .)
done
