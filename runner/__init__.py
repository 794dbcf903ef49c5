"""tamis: run GGUF language models on CPU and GPU, and read only what matters of a long context.

Only the version and lazily loaded names live here, so that `import tamis` stays cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "tamis.engine.engine",
    "Llama": "tamis.bindings.compat",
    "LlamaGrammar": "tamis.bindings.compat",
    "Session": "tamis.engine.session",
    "SamplerParams": "tamis.sampling.chain",
    "summarize": "tamis.summary.summarize",
}
__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'tamis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
