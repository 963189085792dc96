"""The reference: `public` documents names, and the build fails where a public name is in no page."""

import enum
import importlib
import inspect
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from jaxkv.policies.registry import POLICIES

# What users import from. Their `__all__`, or what they define, is what has to be in the reference.
MODULES = (
    "jaxkv",
    "jaxkv.policies",
    "jaxkv.policies.methods",
    "jaxkv.testing",
    "jaxkv.analysis",
    "jaxkv.evals",
    "jaxkv.checkpoints",
)
# Stands for the classes of all shipped policies.
_POLICIES = "@policies"
_ARRAY_LIKE = "Array | ndarray | bool | number | bool | int | float | complex"


def names_of(module: Any) -> list[str]:
    """A module's public names.

    Args:
        module: imported.

    Returns:
        Its `__all__`, or else what it defines without an underscore.
    """
    if hasattr(module, "__all__"):
        return list(module.__all__)
    mine = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [
        name
        for name, value in mine.items()
        if getattr(value, "__module__", None) == module.__name__
    ]


def _rst(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        members = "   :members:\n" + (
            "   :undoc-members:\n" if issubclass(value, enum.Enum) else ""
        )
        return f".. autoclass:: {module}.{name}\n{members}\n"
    if callable(value):
        return f".. autofunction:: {module}.{name}\n\n"
    return f".. autodata:: {module}.{name}\n   :no-value:\n\n"


class Public(SphinxDirective):
    """Documents the names in its content, all from the module that is its argument: a table, then each of them.

    `@policies` stands for the classes of all shipped policies.
    """

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Sphinx' hook."""
        module = self.arguments[0]
        names = (
            " ".join(self.content)
            .replace(_POLICIES, " ".join(cls.__name__ for cls in POLICIES.values()))
            .split()
        )
        table = (
            ".. autosummary::\n   :nosignatures:\n\n"
            + "".join(f"   ~{module}.{name}\n" for name in names)
            + "\n"
        )
        return self.parse_text_to_nodes(table + "".join(_rst(module, name) for name in names))


def _signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, told: str | None, gives: str | None
) -> Any:
    """What JAX' `ArrayLike` is a name of fills lines."""
    return told and told.replace(_ARRAY_LIKE, "ArrayLike"), gives


def _docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings write code between backticks, which Sphinx' own markup spells otherwise."""
    out: list[str] = []
    inside = False
    for line in lines:
        if line.strip().startswith("```"):
            inside = not inside
            at = line[: len(line) - len(line.lstrip())]
            out += [f"{at}.. code-block:: {line.strip()[3:] or 'python'}", ""] if inside else [""]
        else:
            out.append(f"   {line}" if inside else line)
    lines[:] = out


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    documented = set()
    for path in env.get_domain("py").objects:
        module, _, name = path.rpartition(".")
        if module in MODULES:
            documented.add(id(getattr(importlib.import_module(module), name)))
    for module in map(importlib.import_module, MODULES):
        for name in names_of(module):
            if id(getattr(module, name)) not in documented:
                logging.getLogger(__name__).warning(
                    "%s.%s is public and in no page: add it to one in docs/api, below `.. public:: %s`",
                    module.__name__,
                    name,
                    module.__name__,
                )


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx' hook."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-signature", _signature)
    app.connect(
        "autodoc-process-docstring", _docstring, priority=400
    )  # before napoleon reads sections
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True}
