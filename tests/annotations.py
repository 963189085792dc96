"""Checks jaxkv's annotations while tests run: types by beartype, shapes by jaxtyping, arguments and results alike.

jaxtyping's own hook wraps every function for shapes, binds its arguments and checks them twice, which took a third of
the tests' time. Here only functions whose annotations speak of shapes get a scope for their axes; all are checked,
in the first calls of every test: a few helpers are called thousands of times, and that took a seventh of the time.
"""

import ast
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import sys
import threading
import typing

import beartype
import jaxtyping

_NAME = "__checked__"
# Calls of a function that are checked in a test.
_MOST_CALLS = 32
_tests = 0
# What the library raises itself for a value of the wrong type.
_typed = beartype.beartype(conf=beartype.BeartypeConf(violation_type=TypeError))


def _shapes(hint: object) -> bool:
    """Whether shapes stand in an annotation, however deep."""
    if isinstance(hint, str):
        return True  # a forward reference, which may be anything
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_shapes, typing.get_args(hint)))


def begin_test() -> None:
    """The next calls of every function are checked again."""
    global _tests
    _tests += 1


def checked(of):
    """A function that checks its arguments and its result by their annotations, or a dataclass whose fields are."""
    if isinstance(of, type):
        made = vars(of).get("__init__")
        if dataclasses.is_dataclass(of) and made is not None and not hasattr(made, "__wrapped__"):
            of.__init__ = checked(made)
        return of
    if not of.__annotations__:
        return of
    typed, scoped = _typed(of), any(map(_shapes, of.__annotations__.values()))
    test, calls = -1, 0

    @functools.wraps(of)
    def call(*args, **kwargs):
        nonlocal test, calls
        __tracebackhide__ = True
        if test != _tests:
            test, calls = _tests, 0
        calls += 1
        if calls > _MOST_CALLS or jaxtyping.config.jaxtyping_disable:
            return of(*args, **kwargs)
        # It describes programs: JAX puts shapes where annotations want arrays.
        if threading.current_thread().name == "jaxkv-compile":
            return of(*args, **kwargs)
        if not scoped:
            return typed(*args, **kwargs)
        with jaxtyping.jaxtyped("context"):
            return typed(*args, **kwargs)

    return call


class _Decorate(ast.NodeTransformer):
    """Puts the check innermost on functions, below `jax.jit`, and outermost on classes, above `dataclass`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list.append(ast.copy_location(ast.Name(_NAME, ast.Load()), node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, ast.copy_location(ast.Name(_NAME, ast.Load()), node))
        return self.generic_visit(node)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):
        # Not through files of compiled modules: those are of modules without checks.
        tree = _Decorate().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module) -> None:
        setattr(module, _NAME, checked)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def check(package: str) -> None:
    """From now on, modules of the package are imported with checks."""
    if package in sys.modules:
        raise RuntimeError(
            f"{package} is imported already, so that nothing would check its annotations"
        )
    sys.meta_path.insert(0, _Finder(package))
