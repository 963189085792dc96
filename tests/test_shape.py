"""How often the engine asks what a type could say; each number may fall, and is lowered here when it does."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parent.parent / "jaxkv"


def branches_on_none() -> Iterator[ast.AST]:
    """`if`, `while` and conditional expressions of the engine that compare something with None."""
    for node in nodes("engine"):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            found = (each for each in ast.walk(node.test) if isinstance(each, ast.Compare))
            if any(is_none(side) for each in found for side in each.comparators):
                yield node


def rules() -> Iterator[ast.AST]:
    """What methods that check policies require."""
    for node in nodes("policies"):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("_check", "check_")):
            for each in ast.walk(node):
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "require":
                    yield each


def undeclared_hooks() -> Iterator[ast.AST]:
    """Attributes of policies' parts that are asked for without a declaration in their base class."""
    for node in nodes("policies", "engine"):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            of, name, *default = node.args
            declared = isinstance(of, ast.Name) and of.id in ("self", "given", "module")
            if isinstance(name, ast.Constant) and (default or node.func.id == "hasattr"):
                if not declared:
                    yield node


def exact_types() -> Iterator[ast.AST]:
    """Comparisons of an object's type, so that a subclass is treated otherwise than its base."""
    for node in nodes("policies", "engine", "cache"):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            plain = ast.unparse(node.comparators[0]) in ("_PLAIN", "tuple")
            if ast.unparse(node.left.func) == "type" and not plain:
                yield node


def nodes(*packages: str) -> Iterator[ast.AST]:
    """All nodes of the packages' modules."""
    for package in packages:
        for path in sorted((LIBRARY / package).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text("utf-8")))


def is_none(node: ast.AST) -> bool:
    """Whether it is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


MOST: list[tuple[Callable[[], Iterator[ast.AST]], int]] = [
    (branches_on_none, 178),
    (rules, 36),
    (undeclared_hooks, 0),
    (exact_types, 0),
]


@pytest.mark.parametrize("kind, most", MOST, ids=lambda each: getattr(each, "__name__", ""))
def test_no_more_than_there_were(kind, most):
    found = [ast.unparse(each)[:100] for each in kind()]
    assert len(found) <= most, found
