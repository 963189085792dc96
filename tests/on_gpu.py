"""The tests of kernels on this machine's GPU: `pytest --gpu` compiles what other runs interpret."""

import functools

import jax

import jaxkv.attention.kernels
import pallas_kernels


def compile_kernels() -> None:
    """Has every kernel that a test asks to interpret compiled; float32 products keep their precision.

    Raises:
        RuntimeError: without a GPU.
    """
    if jax.default_backend() != "gpu":
        raise RuntimeError(
            "--gpu: JAX finds no GPU here; leave it out to interpret the kernels on a CPU"
        )
    # A GPU's products of float32 round to 10 bits by default, in XLA's formulation as elsewhere.
    jax.config.update("jax_default_matmul_precision", "highest")
    for name in pallas_kernels.__all__:
        function = getattr(pallas_kernels, name)
        if not isinstance(function, type):
            setattr(pallas_kernels, name, _compiled(function))
    jaxkv.attention.kernels.InterpretedPallasBackend.interpret = False


def _compiled(function):
    """`function`, which never interprets."""

    @functools.wraps(function)
    def call(*args, **options):
        return function(
            *args, **{name: value for name, value in options.items() if name != "interpret"}
        )

    return call
