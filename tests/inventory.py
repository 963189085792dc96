"""Lists what the tests stand on, so that a smaller suite can be held against a larger one.

python -m tests.inventory [ROOT]   functions of oracles, golden files, seeded faults, what counts compilations, and what
                                   lists collectives between devices; ROOT is another checkout to read.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# Words by which a test shows that it counts compilations, or lists collectives.
COMPILES = ("compilations", "Listener", "backend_compile_duration")
TRAVELS = ("all-reduce", "all-gather", "all-to-all", "TRAVELS", "COMPILED")


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Public functions at the top of a file."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def mentions(node: ast.AST, words: tuple[str, ...]) -> bool:
    """Whether a name, an attribute or a text in a function is one of these words."""
    found = set()
    for each in ast.walk(node):
        found |= {getattr(each, "id", None), getattr(each, "attr", None)}
        found.add(each.value if isinstance(each, ast.Constant) else None)
    return any(word in found for word in words)


def faults(path: Path) -> list[str]:
    """Names of the seeded faults, one for each check that must find one."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAULTS":
            return [ast.unparse(case.elts[0]) for case in node.value.elts]
    raise ValueError(f"path={path}: it has no FAULTS.")


def inventory(root: Path) -> dict[str, list[str]]:
    """All lists of a checkout, by their subject."""
    tests = root / "tests"
    golden = [path for path in (tests / "golden").rglob("*") if path.suffix not in (".py", ".pyc")]
    every = [
        (path.stem, node) for path in sorted(tests.glob("test_*.py")) for node in functions(path)
    ]
    return {
        "oracles": [
            f"{path.stem}.{node.name}"
            for path in sorted((tests / "oracles").glob("*.py"))
            for node in functions(path)
        ],
        "golden files": sorted(str(path.relative_to(tests)) for path in golden if path.is_file()),
        "seeded faults": faults(tests / "test_seeded_faults.py"),
        "compile counts": [f"{at}.{node.name}" for at, node in every if mentions(node, COMPILES)],
        "collective lists": [f"{at}.{node.name}" for at, node in every if mentions(node, TRAVELS)],
    }


def main() -> None:
    """Prints each list behind its length."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for subject, names in inventory(root).items():
        print(f"{subject}: {len(names)}")
        for name in names:
            print(f"  {name}")


if __name__ == "__main__":
    main()
