"""What the tests find by jaxkv's annotations: wrong arguments and results, of types as of shapes, in every package."""

import dataclasses

import jax.numpy as jnp
import pytest
from annotations import checked
from jaxtyping import Array, Float

from jaxkv.checkpoints.gguf_file import GgufFile
from jaxkv.models.rope import RopeTables, apply_rope
from pallas_kernels import decode


@checked
def scale(
    a: Float[Array, "B D"], by: int, *, b: Float[Array, "#B D"] | None = None
) -> Float[Array, "B 2"]:
    return a * by if b is None else a * by + b


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two arrays of one length, and a name."""

    k: Float[Array, " P"]
    v: Float[Array, " P"]
    name: str = ""

    @classmethod
    @checked
    def twice(cls, k: Float[Array, " P"]) -> "Pair":
        return cls(k=k, v=k)

    @property
    @checked
    def rows(self) -> str:
        return len(self.k)  # no text


WRONG = {
    "type": lambda: scale(jnp.ones((3, 2)), 2.0),
    "dtype": lambda: scale(jnp.ones((3, 2), int), 2),
    "axes": lambda: scale(jnp.ones((1, 3, 2)), 2),
    "letter": lambda: scale(jnp.ones((3, 2)), 2, b=jnp.ones((3, 1))),
    "result": lambda: scale(jnp.ones((3, 4)), 2),
    "field": lambda: Pair(k=jnp.ones(2), v=jnp.ones(1)),
    "name": lambda: Pair(k=jnp.ones(2), v=jnp.ones(2), name=1),
    "classmethod": lambda: Pair.twice(jnp.ones((2, 2))),
    "property": lambda: Pair.twice(jnp.ones(2)).rows,
}


def test_what_fits_passes():
    assert scale(jnp.ones((3, 2)), 2, b=jnp.ones((1, 2))).shape == (3, 2)
    assert scale(a=jnp.ones((4, 2)), by=2).shape == (4, 2)  # logical axes are of one call
    assert Pair.twice(jnp.ones(2)).name == ""


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_found(case):
    with pytest.raises(TypeError, match="violates type hint"):
        WRONG[case]()


@pytest.mark.parametrize("case", WRONG)
def test_nothing_is_checked_as_users_call(case, as_users_call):
    WRONG[case]()


def test_every_package_is_checked():
    angles = RopeTables(cos=jnp.ones((1, 3, 4)), sin=jnp.ones((1, 3, 4)))
    assert apply_rope(jnp.ones((2, 1, 3, 8)), angles).shape == (2, 1, 3, 8)
    with pytest.raises(TypeError, match="violates type hint"):
        RopeTables(cos=jnp.ones((1, 3, 4)), sin=jnp.ones((1, 3, 5)))
    for of in (apply_rope, decode.attend, GgufFile.__init__):
        assert of.__wrapped__, of
