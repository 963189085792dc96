"""Write the lists that follow from the policies: `python docs/make_lists.py`, which `make format` runs.

Policies are found in `jaxkv/policies/methods`; their order is that of the table in `docs/policies.md`, written by hand.
From both follow the imports of `jaxkv/policies/methods/__init__.py` and the policies that `jaxkv` exports. The options
in `docs/command_line.md` are those of the commands' parsers.
"""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import commands  # noqa: E402

from jaxkv.policies import methods  # noqa: E402
from jaxkv.policies.policy import Policy  # noqa: E402
from jaxkv.policies.registry import POLICIES  # noqa: E402

INIT, TOP = ROOT / "jaxkv/policies/methods/__init__.py", ROOT / "jaxkv/__init__.py"
TABLE, COMMANDS = ROOT / "docs/policies.md", ROOT / "docs/command_line.md"
_ROW = re.compile(r"^\| `(\w+)` \|.*\|$", flags=re.M)
_HEADER = '''"""Methods of the literature, one short file each; importing them makes their names known, in this order.

Written by docs/make_lists.py from the files in this folder: a new policy needs no line here.
"""

# isort: off
'''


def found() -> dict[str, type[Policy]]:
    """Classes of the shipped policies by name, in the order of the table in docs/policies.md; others last."""
    for module in pkgutil.iter_modules(methods.__path__):
        importlib.import_module(f"{methods.__name__}.{module.name}")
    classes = {
        cls.__name__: cls
        for cls in POLICIES.values()
        if cls.__module__.startswith(methods.__name__)
    }
    order = _ROW.findall(TABLE.read_text("utf-8"))
    return dict(
        sorted(
            classes.items(),
            key=lambda item: order.index(item[0]) if item[0] in order else len(order),
        )
    )


def init_text() -> str:
    """Text of `methods/__init__.py`: imports of each module's policies, and `__all__`."""
    by_module: dict[str, list[str]] = {}
    for name, cls in found().items():
        by_module.setdefault(cls.__module__, []).append(name)
    lines = [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]
    listed = "\n".join(f'    "{name}",' for name in sorted(found()))
    return _HEADER + "\n".join(lines) + f"\n# isort: on\n\n__all__ = [\n{listed}\n]\n"


def top_text() -> str:
    """Text of `jaxkv/__init__.py` with the names of all policies, 8 a line."""
    names = sorted(found())
    lines = [" ".join(names[at : at + 8]) for at in range(0, len(names), 8)]
    listed = "\n".join(f'        "{line}{" " if line != lines[-1] else ""}"' for line in lines)
    block = re.compile(r'("jaxkv\.policies\.methods": \(\n).*?(\n    \),)', flags=re.S)
    return block.sub(lambda match: match[1] + listed + match[2], TOP.read_text("utf-8"))


def commands_text() -> str:
    """Text of docs/command_line.md with the options of all commands."""
    head, mark, _ = COMMANDS.read_text("utf-8").partition("<!-- Written by docs/make_lists.py")
    return f"{head}{mark} from the commands' parsers. -->\n\n{commands.text().rstrip()}\n"


def main(*, write: bool = True) -> list[str]:
    """Write the files; return the names of those whose text changed."""
    texts = {INIT: init_text(), TOP: top_text(), COMMANDS: commands_text()}
    stale = [path for path, text in texts.items() if path.read_text("utf-8") != text]
    for path in stale if write else ():
        path.write_text(texts[path], encoding="utf-8")
    return [str(path.relative_to(ROOT)) for path in stale]


if __name__ == "__main__":
    print(*main(), sep="\n")
