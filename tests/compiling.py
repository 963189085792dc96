"""Cheaper lowering and compiling while tests run: programs of equal text are compiled once, MLIR contexts are reused.

Both stand behind JAX's own caches: a program that JAX compiles is counted and timed as compiled, whether or not another
function, policy or file had the same one before.
"""

import hashlib
import inspect
import io
import threading
from typing import Any

from jax._src import compiler
from jax._src.interpreters import mlir

# What the patched functions take in the JAX versions that were looked at; others stay as they are.
_COMPILE = ("backend", "module", "executable_devices", "options", "host_callbacks")
# A context keeps every constant that its modules had.
_MODULES_A_CONTEXT = 100

_programs: dict[bytes, Any] = {}
_mine = threading.local()


def forget() -> None:
    """Frees the shared executables."""
    _programs.clear()


def install() -> None:
    """Lets JAX share executables and MLIR contexts from now on."""
    if tuple(inspect.signature(compiler.backend_compile_and_load).parameters) == _COMPILE:
        compiler.backend_compile_and_load = _sharing(compiler.backend_compile_and_load)
    if not inspect.signature(mlir.make_ir_context).parameters:
        mlir.make_ir_context = _reusing(mlir.make_ir_context)


def _sharing(compile_):
    """`compile_`, which gives the executable of an earlier module of the same text, options and devices."""

    def compiled(backend, module, executable_devices, options, host_callbacks):
        key = (
            _key(module, executable_devices, options)
            if backend.platform == "cpu" and not host_callbacks
            else None
        )
        if key is None:
            return compile_(backend, module, executable_devices, options, host_callbacks)
        if key not in _programs:
            _programs[key] = compile_(backend, module, executable_devices, options, host_callbacks)
        return _programs[key]

    return compiled


def _key(module, devices, options) -> bytes | None:
    """Hash of a module without its source locations; None if it calls Python, by addresses that others may get."""
    text = io.BytesIO()
    with module.context:
        bare = module.operation.clone()
        mlir.passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(bare)
        bare.write_bytecode(file=text)
    if b"callback" in text.getvalue():
        return None
    return hashlib.sha256(
        b"|".join(
            [text.getvalue(), options.SerializeAsString(), repr([d.id for d in devices]).encode()]
        )
    ).digest()


def _reusing(make):
    """`make`, whose contexts serve many modules of one thread."""

    def context():
        left = getattr(_mine, "left", 0)
        if left == 0:
            _mine.context, left = make(), _MODULES_A_CONTEXT
        _mine.left = left - 1
        return _mine.context

    return context
