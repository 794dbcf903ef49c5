"""tamis: run GGUF language models on CPU and GPU, and read only what matters of a long context.

Only the version and lazily loaded names are defined here, so that `import tamis` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tamis.version import __version__

if TYPE_CHECKING:
    from tamis.bindings.compat import Llama, LlamaGrammar
    from tamis.engine.engine import Engine
    from tamis.engine.session import Session
    from tamis.evals.evaluate import evaluate
    from tamis.fetch.registry import pull
    from tamis.sampling.chain import SamplerParams
    from tamis.select.in_numpy import NumpySelector
    from tamis.summary.plan import Settings
    from tamis.summary.prompts import Task
    from tamis.summary.summarize import summarize

__all__ = [
    "Engine",
    "Llama",
    "LlamaGrammar",
    "NumpySelector",
    "SamplerParams",
    "Session",
    "Settings",
    "Task",
    "__version__",
    "evaluate",
    "pull",
    "summarize",
]

_EXPORTS = {
    "Engine": "tamis.engine.engine",
    "Llama": "tamis.bindings.compat",
    "LlamaGrammar": "tamis.bindings.compat",
    "NumpySelector": "tamis.select.in_numpy",
    "SamplerParams": "tamis.sampling.chain",
    "Session": "tamis.engine.session",
    "Settings": "tamis.summary.plan",
    "Task": "tamis.summary.prompts",
    "evaluate": "tamis.evals.evaluate",
    "pull": "tamis.fetch.registry",
    "summarize": "tamis.summary.summarize",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'tamis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
