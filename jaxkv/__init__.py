"""jaxkv: KV-cache compression for long-context inference in JAX.

A name is imported from its module at its first use: `import jaxkv` imports neither JAX nor Flax.
"""

import importlib
import importlib.util
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.cache import KVCache
    from jaxkv.cache.saved import load_cache
    from jaxkv.engine.generation_results import Generation
    from jaxkv.engine.sampling import Sampling
    from jaxkv.engine.session import Session
    from jaxkv.evals import evaluate
    from jaxkv.exporting import export
    from jaxkv.generation import generate, prefill
    from jaxkv.loading import LanguageModel, load
    from jaxkv.models.config import ModelConfig
    from jaxkv.planning.planner import plan
    from jaxkv.policies import CustomPolicy, Policy
    from jaxkv.policies.methods import *  # noqa: F403
    from jaxkv.serving import Engine
    from jaxkv.sharding.resharding import reshard
    from jaxkv.text.chat import Chat
    from jaxkv.text.grammar import Grammar
    from jaxkv.transform.compressing import compress, compress_layers
    from jaxkv.transform.state import CompressedKV

# Module of each public name. Type checkers read the imports above, and a test keeps the two lists equal.
_HOMES = {
    "jaxkv.cache": "KVCache",
    "jaxkv.cache.saved": "load_cache",
    "jaxkv.engine.generation_results": "Generation",
    "jaxkv.engine.sampling": "Sampling",
    "jaxkv.engine.session": "Session",
    "jaxkv.evals": "evaluate",
    "jaxkv.exporting": "export",
    "jaxkv.generation": "generate prefill",
    "jaxkv.loading": "LanguageModel load",
    "jaxkv.models.config": "ModelConfig",
    "jaxkv.planning.planner": "plan",
    "jaxkv.policies": "CustomPolicy Policy",
    # Written by docs/make_lists.py.
    "jaxkv.policies.methods": (
        "AdaKV Auto BrutalOffload CAKE CAPKV CaM ChunkKV Compactor "
        "CriticalKV CurDKV D2O DefensiveKV DropKV DuoAttention ExpectedAttention FastKVzip "
        "FullKV GlobalBudget H2O HeadKV KNorm KVGrad KVzap KVzip "
        "KeyDiff LUKV LagKV LayerDefensiveKV LocalWindow OmniKV PyramidInfer PyramidKV "
        "QFilters Quest RKV RandomKV Refit RoCo RocketKV SimLayerKV "
        "SnapKV StreamingLLM TOVA TriAttention"
    ),
    "jaxkv.serving": "Engine",
    "jaxkv.sharding.resharding": "reshard",
    "jaxkv.text.chat": "Chat",
    "jaxkv.text.grammar": "Grammar",
    "jaxkv.transform.compressing": "compress compress_layers",
    "jaxkv.transform.state": "CompressedKV",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_MODULES)
__version__: str
_ONE_AT_A_TIME = threading.RLock()


def _read_package_version() -> str:
    """Return the installed package's version as text; "unknown" if the package is not installed."""
    from importlib import (
        metadata,
    )  # Imported late because it takes longer than all of `import jaxkv`.

    try:
        return metadata.version("jaxkv")
    except metadata.PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    """Module hook (PEP 562): return a public object or submodule, imported at first use; else AttributeError.

    `__version__` is also looked up at its first use.
    """
    if name == "__version__":
        return globals().setdefault(name, _read_package_version())
    public = name in _MODULES
    found = public or (
        name.isidentifier()
        and not name.startswith("_")
        and importlib.util.find_spec(f"jaxkv.{name}")
    )
    if not found:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    if not public:
        return importlib.import_module(f"jaxkv.{name}")
    # Threads that request different names concurrently would import modules from their middle, each waiting for the
    # others' locks. jaxkv's own modules request only submodules, so none of them waits here during its import.
    with _ONE_AT_A_TIME:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the sorted names of the package's attributes, including public names not yet imported."""
    return sorted({*globals(), *_MODULES})
