"""A store of one's own, named by `Parts.store` alone: rows in fewer bits through prefill, eviction and merging."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import D2O, SnapKV
from jaxkv.cache import DenseStore
from jaxkv.testing import check_policy

DECODED = []


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["wide"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Half(DenseStore):
    """Rows as float16, whatever the model's dtype."""

    kernels: ClassVar[tuple[str, ...]] = ()
    wide: str

    @classmethod
    def encode_entries(cls, k, v):
        return cls(k=k.astype(jnp.float16), v=v.astype(jnp.float16), wide=str(k.dtype))

    @classmethod
    def compute_entry_bytes(cls, dim, itemsize):
        return 2 * dim * 2

    @property
    def dtype(self):
        return jnp.dtype(self.wide)

    def decode_entries(self):
        if not isinstance(self.k, jax.core.Tracer):
            DECODED.append(self.k.shape)
        return self.k.astype(self.dtype), self.v.astype(self.dtype)


def halved(base):
    """A class of policies like `base`, whose rows are held as float16."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Halved(base):
        def build_policy_parts(self):
            return dataclasses.replace(super().build_policy_parts(), store=Half)

    return Halved


@pytest.mark.parametrize("base", (SnapKV, D2O))
def test_a_policy_over_a_rounding_store_keeps_its_promises(base):
    options = {"window": 4} if base is SnapKV else {}
    check_policy(halved(base)(budget=24, **options))


def test_rows_take_half_the_bytes_and_are_decoded_in_programs_alone():
    model, prompts = tiny.tiny(tiny.MODELS["gqa3"]), tiny.prompts(1, (61, 40))
    whole, half = (kind(budget=16, window=4) for kind in (SnapKV, halved(SnapKV)))
    DECODED.clear()
    # Rows beside positions and tables: bytes of keys and values alone differ.
    sizes, tokens = [], []
    for policy in (whole, half):
        session = jaxkv.Session(model, policy)
        cache = session.prefill(prompts, new=8)
        sizes.append(cache.nbytes)
        tokens.append(session.sample(cache, 8)[1])
    rows = sum(pool.row_count for pool in cache.pools) * 2
    assert sizes[0] - sizes[1] == rows * 2 * 8 * (4 - 2)
    assert np.array_equal(*tokens)
    assert not DECODED
