"""Models of 16 bits on a CPU: the cache holds their entries, rounded, as float32."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import jaxkv
from jaxkv.cache.stores import choose_cache_dtype
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Decoder

LENGTHS = [37, 21]
POLICIES = {
    "full": jaxkv.FullKV(),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "offloaded": jaxkv.OmniKV(filter_layers=(0,), adjacent=0, budget=12, offload=True),
    "quest": jaxkv.Quest(budget=16, page=4, dense_layers=1),
    "int8": jaxkv.SnapKV(budget=16, window=8, store="int8"),
    "merged again": jaxkv.SnapKV(budget=16, window=8, every=2, merge=jaxkv.policies.Merge()),
}


@functools.cache
def narrow_and_wide():
    """A model of bfloat16, and a float32 one with the same weights."""
    narrow = tiny.tiny(tiny.TWO_LAYERS, dtype="bfloat16")
    decoder = Decoder(narrow.config, dtype=jnp.float32)
    weights = nnx.state(narrow.decoder, nnx.Param)
    nnx.update(decoder, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights))
    return narrow, LanguageModel(decoder, text=None, name="wide")


@dataclasses.dataclass(frozen=True)
class _Noise:
    """Tokens of the key alone, whatever the logits: both models then see the same text."""

    def __call__(self, logits, keys):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, logits.shape[-1], jnp.int32))(
            keys
        )


def test_decoding_is_close_to_float32():
    """Of layers in the cache, and of rows in host memory."""
    results, texts = [], []
    for model in narrow_and_wide():
        session = jaxkv.Session(model, POLICIES["offloaded"])
        cache = session.prefill(tiny.prompts(1, LENGTHS), new=6)
        after, text = session.sample(cache, 6, sampling=_Noise(), key=0)
        results.append(np.asarray(after.logits))
        texts.append(text)
    np.testing.assert_array_equal(*texts)
    assert 0 < np.abs(results[0] - results[1]).max() < 0.06 * np.abs(results[1]).max()


@pytest.mark.parametrize("name", POLICIES)
def test_entries_are_rounded_counted_and_saved_in_16_bits(tmp_path, name):
    model, _ = narrow_and_wide()
    session = jaxkv.Session(model, POLICIES[name])
    plan = session.plan_without_memory_check(np.asarray(LENGTHS), 4)
    cache = session.prefill(tiny.prompts(1, LENGTHS), needed=plan)
    assert cache.nbytes == plan.cache_bytes and cache.host_nbytes == plan.host_bytes
    cache, _ = session.sample(cache, 4)
    assert cache.dtype == "bfloat16" and {pool.dtype.name for pool in cache.pools} == {"float32"}
    # As a GPU holds it, and back.
    narrow = cache.cast_to_dtype(cache.dtype)
    assert {pool.dtype.name for pool in narrow.pools} == {"bfloat16"}
    for at, each in enumerate((cache, narrow)):
        each.save(tmp_path / str(at))
        loaded = jaxkv.load_cache(tmp_path / str(at), model)
        assert jax.tree.structure(loaded) == jax.tree.structure(cache)
        for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(cache), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        manifest = json.loads((tmp_path / str(at) / "jaxkv.json").read_text())
        assert "bfloat16" in json.dumps(manifest)


def test_other_devices_hold_the_models_dtype(tmp_path):
    model, _ = narrow_and_wide()
    folder = jaxkv.export(
        model, tmp_path / "out", lengths=64, new=4, question=0, platforms=("cpu", "cuda")
    )
    said = json.loads((folder / "manifest.json").read_text())
    held = {
        each["platform"]: {
            out["dtype"] for out in each["outputs"] if out["name"].startswith("pools.0.store")
        }
        for each in said["programs"]
    }
    assert held == {"cpu": {"float32"}, "cuda": {"bfloat16"}}
    assert choose_cache_dtype("bfloat16", "tpu") == jnp.bfloat16
