"""How the files lie: imports go one way, each backend of Pallas has one door."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "jaxkv")
# A module imports from the lines above its own, and from its own package. A new module is a new line.
LAYERS = (
    "pallas_kernels",
    "jaxkv._plotting",
    "jaxkv._errors",
    "jaxkv._dataclasses",
    "jaxkv.checkpoints",
    "jaxkv._checks",
    # Where arrays lie: every program asks.
    "jaxkv.sharding.logical_axes",
    "jaxkv.sharding.mesh",
    "jaxkv.sharding.record",
    "jaxkv.sharding.sharded_program",
    "jaxkv.sharding.collectives",
    "jaxkv.attention",
    "jaxkv.machine",
    # What a cache knows of its model.
    "jaxkv.models.values",
    "jaxkv.models.states",
    "jaxkv.models.stored",
    "jaxkv.models.hub_rope",
    "jaxkv.models.hub",
    "jaxkv.models.config",
    "jaxkv.models.rope",
    "jaxkv.cache",
    "jaxkv.policies",
    "jaxkv.models",
    "jaxkv.sharding",
    "jaxkv.text",
    "jaxkv.engine.sampling",
    "jaxkv.models.weights",
    "jaxkv.loading",
    # Sizes: arguments are rejected by them.
    "jaxkv.engine.hadamard",
    "jaxkv.engine.lengths",
    "jaxkv.engine.prefill_bytes",
    "jaxkv.engine.plan",
    "jaxkv.arguments",
    "jaxkv.engine",
    "jaxkv.transform",
    "jaxkv.sharding.resharding",
    "jaxkv.cache.saved",
    "jaxkv.exporting",
    "jaxkv.engine.generation_results",
    "jaxkv.generation",
    "jaxkv.serving",
    "jaxkv.testing",
    "jaxkv.analysis",
    "jaxkv.evals",
    # Before anything is there; scores of evaluations stand beside bytes.
    "jaxkv.planning",
    "jaxkv",
    "jaxkv.cli",
    "jaxkv.__main__",
)
DOORS = {"_compat.py": "triton", "_compat_mosaic.py": "mosaic_gpu", "_compat_tpu.py": "tpu"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources(*PACKAGES)}


def layer_of(module: str) -> str:
    """The longest line that the module is, or is in; the package jaxkv holds only its own __init__."""
    fits = [
        name
        for name in LAYERS
        if module == name or (name != "jaxkv" and module.startswith(f"{name}."))
    ]
    assert fits, f"{module} stands on no line of LAYERS: give it one"
    return max(fits, key=len)


def imported(tree: ast.AST, path: Path) -> Iterator[str]:
    """Names of imported modules, wherever in the file, `from package import module` resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in names if name in MODULES]
            yield from modules
            if len(modules) < len(names):
                yield str(node.module)


def broken(module: str, targets: list[str]) -> list[str]:
    mine = layer_of(module)
    ours = [target for target in targets if target.split(".")[0] in PACKAGES]
    high = LAYERS.index(mine)
    return [
        f"{module} -> {t}" for t in ours if layer_of(t) != mine and LAYERS.index(layer_of(t)) > high
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    path = MODULES[module]
    targets = list(imported(ast.parse(path.read_text("utf-8")), path))
    assert not broken(module, targets)


def test_no_file_needs_itself():
    """Nor by way of others, also of its own package: a circle is what imports within functions hide."""
    needs = {
        module: set(imported(ast.parse(path.read_text("utf-8")), path))
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(
        {module: names & MODULES.keys() - {module} for module, names in needs.items()}
    ).prepare()


def test_the_rule_bites():
    tree = ast.parse(
        "from jaxkv import generation\nfrom jaxkv.policies import SnapKV\nimport jaxkv"
    )
    targets = list(imported(tree, ROOT / "inline.py"))
    assert broken("jaxkv.cache", targets) == [
        "jaxkv.cache -> jaxkv.generation",
        "jaxkv.cache -> jaxkv.policies",
        "jaxkv.cache -> jaxkv",
    ]
    assert not broken("jaxkv.cli", targets)
    assert not broken("jaxkv.policies.adakv", ["jaxkv.policies.snapkv", "jaxkv._errors", "jax"])


def pallas_in(tree: ast.AST) -> list[str]:
    """What a file imports of Pallas, in whatever way it says so."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "jax" and "pallas" in name.split(".")]


def test_each_backend_of_pallas_has_one_door():
    doors = {ROOT / "pallas_kernels" / name: backend for name, backend in DOORS.items()}
    for path in sources(*PACKAGES, "tests", "benchmarks"):
        found = pallas_in(ast.parse(path.read_text("utf-8")))
        assert bool(found) == (path in doors), path
        others = set(DOORS.values()) - {doors.get(path)}
        assert not [name for name in found if others & set(name.split("."))], path


def test_mosaic_waits_until_it_is_asked_for():
    """It imports a second compiler: nobody pays who does not use it."""
    code = "import sys, pallas_kernels as p; print(*(n for n in sys.modules if n.startswith(p.__name__)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pallas_kernels.prefill" in done.stdout and "mosaic" not in done.stdout


def test_packages_hold_the_code():
    """Ten modules stand beside them, each a subject of its own; another joins what it serves."""
    assert len(list((ROOT / "jaxkv").glob("*.py"))) <= 10
