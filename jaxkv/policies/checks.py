"""What users' parts give, checked while a program is traced: it costs nothing then, and names the part at fault."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def checked(part: Any, method: str, given: Any, shape: tuple[int, ...], about: str, dtype: Any = jnp.float32) -> Array:
    """What a part's method gave, if it is what it should be.

    Args:
        part: a scorer, a rank or a merger.
        method: of which method.
        given: what it returned.
        shape: what is wanted.
        about: what that stands for, in words.
        dtype: what is wanted.

    Returns:
        The same.

    Raises:
        TypeError: naming the part, what it gave and what is wanted.
    """
    mine, kind = getattr(given, "shape", None), getattr(given, "dtype", None)
    if mine != tuple(shape) or kind != dtype:
        gave = type(given).__name__ if mine is None else f"{kind}{list(mine)}"
        remedy = f"give one {jnp.dtype(dtype).name} for each {about} = {list(shape)}"
        raise TypeError(f"{type(part).__name__}.{method}={gave}: {remedy}")
    return given


def checked_tuple(part: Any, method: str, given: Any, kind: type) -> Any:
    """What a merger's method gave, if it is of the right kind.

    Args:
        part: the merger.
        method: of which method.
        given: what it returned.
        kind: a named tuple's class.

    Returns:
        The same.

    Raises:
        TypeError: naming the merger, what it gave and what is wanted.
    """
    if not isinstance(given, kind):
        fields = ", ".join(kind._fields)  # type: ignore[attr-defined]
        raise TypeError(f"{type(part).__name__}.{method}={type(given).__name__}: return {kind.__name__}({fields})")
    return given
