"""What an installed jaxkv takes from the path, and what it leaves there for others."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxkv

ROOT = Path(__file__).parent.parent
# Folders of data of a wheel, by where they are in a checkout.
PACKAGED = {"jaxkv.checkpoints.packaged": ROOT / "checkpoints"}


def run(folder, code, *, root=ROOT):
    """Runs a script of a user's, in a folder that comes before ours on the path."""
    (folder / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    out = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr


def test_a_wheel_holds_manifests_and_the_packaged_model(tmp_path):
    site = tmp_path / "site-packages"
    for name in ("jaxkv", "pallas_kernels"):
        shutil.copytree(ROOT / name, site / name)
    shutil.copytree(ROOT / "checkpoints", site / "jaxkv" / "checkpoints" / "packaged")
    # Folders of users of this name are not ours.
    (tmp_path / "checkpoints").mkdir()
    inside = "from jaxkv import checkpoints\n"
    inside += "assert checkpoints.list_model_names()\n"
    inside += f"assert str(checkpoints.find_manifests_folder()).startswith({str(site)!r})\n"
    inside += "assert checkpoints.fetch_checkpoint('tiny-retrieval').is_dir()\n"
    run(tmp_path, inside, root=site)
    # `python -m` finds its command there by the name that it has in a checkout, too.
    asked = "import runpy, sys\nsys.argv[1:] = ['convert', '--help']\n"
    asked += "runpy.run_module('jaxkv.checkpoints', None, '__main__')\n"
    for root in (site, ROOT):
        run(tmp_path, asked, root=root)


def test_every_file_of_data_is_installed():
    """A package's data are the files that its code reads; those for its readers stay behind."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    inside = {
        f"jaxkv.{name}": ROOT / "jaxkv" / name.replace(".", "/")
        for name in ("planning", "evals", "evals.ruler")
    }
    for name, folder in (PACKAGED | inside).items():
        others = [path.parent for path in folder.rglob("__init__.py") if path.parent != folder]
        files = [
            path
            for path in folder.rglob("*")
            if path.is_file() and not set(others) & set(path.parents)
        ]
        lie = [path.relative_to(folder) for path in files if path.suffix not in (".pyc", ".md")]
        read = {path for path in lie if path.suffix != ".py"}
        taken = {path for path in lie if any(path.match(pattern) for pattern in data.get(name, ()))}
        assert read == taken, name


def test_every_package_is_installed():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    lie = {
        name: setuptools["package-dir"].get(name, name.replace(".", "/"))
        for name in setuptools["packages"]
    }
    found = {
        path.parent
        for top in ("jaxkv", "pallas_kernels")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert {ROOT / folder for folder in lie.values()} == found | set(PACKAGED.values())


def test_importing_jaxkv_imports_nothing_heavy(tmp_path):
    late = {
        "jax",
        "flax",
        "numpy",
        "optax",
        "orbax",
        "scipy",
        "transformers",
        "tokenizers",
        "gguf",
        "safetensors",
    }
    code = "import sys, jaxkv\nassert jaxkv.__version__[0].isdigit()\nfrom jaxkv.cli import main\n"
    code += "assert main(['--version']) == main(['--help']) == 0 and main(['no-command']) == 2\n"
    run(tmp_path, code + f"late = {late!r} & sys.modules.keys()\nassert not late, late\n")


def test_importing_every_public_name_imports_no_reader_of_rare_formats(tmp_path):
    late = {
        "scipy",
        "transformers",
        "tokenizers",
        "gguf",
        "orbax",
        "matplotlib",
        "jinja2",
        "huggingface_hub",
    }
    code = "import sys\nfrom jaxkv import *\nimport jaxkv.analysis, jaxkv.cli, jaxkv.testing\n"
    run(tmp_path, code + f"late = {late!r} & sys.modules.keys()\nassert not late, late\n")


def test_threads_may_import_jaxkv_at_once(tmp_path):
    names = ["plan", "generate", "SnapKV", "compress", "Session", "export", "evaluate", "load"]
    code = f"""
import sys, threading
sys.setswitchinterval(1e-5)  # threads change places often, so that a race is found
failed = []
begin = threading.Barrier({len(names)})
def run(name):
    begin.wait()
    try:
        import jaxkv
        getattr(jaxkv, name)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=run, args=(name,)) for name in {names}]
[each.start() for each in threads], [each.join() for each in threads]
assert not failed, failed
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_type_checkers_and_python_find_the_same_public_names():
    tree = ast.parse((ROOT / "jaxkv" / "__init__.py").read_text("utf-8"))
    block = next(each for each in tree.body if isinstance(each, ast.If))
    said = {name.name: each.module for each in block.body for name in each.names}
    starred = said.pop("*")
    said |= dict.fromkeys(importlib.import_module(starred).__all__, starred)
    assert said == jaxkv._MODULES
    assert all(
        getattr(jaxkv, name) is getattr(importlib.import_module(home), name)
        for name, home in said.items()
    )
    assert {*jaxkv.__all__} <= {*dir(jaxkv)} and jaxkv.policies.SnapKV is jaxkv.SnapKV
    with pytest.raises(AttributeError, match="no attribute 'snapkv'"):
        jaxkv.snapkv  # noqa: B018
    assert not hasattr(jaxkv, "policies.snapkv.<locals>")
