"""How Sphinx builds the pages: `make docs`."""

import os
import sys
import tomllib
import typing
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext")]
# No program is compiled here, and none should look for a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"
# jaxtyping then names its annotations as they are written.
typing.GENERATING_DOCUMENTATION = "jaxtyping"  # type: ignore[attr-defined]

project = "jaxkv"
release = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
copyright = "the authors of jaxkv, Apache-2.0"  # noqa: A001  Sphinx' name
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "included",
    "public",
]
exclude_patterns = ["_build", "requirements.txt"]

html_theme = "furo"
html_title = f"jaxkv {release}"
html_show_sourcelink = False
html_copy_source = False

# Headings are anchors, with the names that they have on a repository's page.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
maximum_signature_line_length = 90
# Docstrings write code in single backticks: a name that is documented becomes a link.
default_role = "py:obj"
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has them
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
add_module_names = False

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
