"""Which implementation runs where, and that the kernels give what XLA gives through the whole of prefill and decode."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.attention import (
    Implementation,
    PrefillDecodeImplementations,
    choose_attention_implementations,
    get_cuda_capability,
)

XLA, PALLAS, CUDNN = Implementation.XLA, Implementation.PALLAS, Implementation.CUDNN
INTERPRETED, MOSAIC = Implementation.INTERPRETED, Implementation.MOSAIC
TPU = Implementation.TPU


def chosen(asked="auto", *, platform="gpu", dtype=jnp.bfloat16, head_dim=128, capability=(8, 0)):
    return choose_attention_implementations(
        asked, platform=platform, dtype=jnp.dtype(dtype), head_dim=head_dim, capability=capability
    )


def test_auto(monkeypatch):
    monkeypatch.setattr("pallas_kernels._compat_mosaic.cuda_version", lambda: None)
    assert chosen(platform="cpu") == PrefillDecodeImplementations(prefill=XLA, decode=XLA)
    for dtype, dim in ((jnp.bfloat16, 128), (jnp.float32, 80)):
        assert chosen(platform="tpu", dtype=dtype, head_dim=dim) == PrefillDecodeImplementations(
            prefill=TPU, decode=TPU
        )
    by_cudnn, by_pallas = (
        PrefillDecodeImplementations(prefill=CUDNN, decode=PALLAS),
        PrefillDecodeImplementations(prefill=PALLAS, decode=PALLAS),
    )
    by_mosaic = PrefillDecodeImplementations(prefill=MOSAIC, decode=PALLAS)
    for dim, capability, expected in (
        (128, None, by_cudnn),
        (128, (9, 0), by_mosaic),
        (64, (9, 0), by_mosaic),
        (96, (9, 0), by_cudnn),
        (128, (10, 0), by_cudnn),
        (80, (8, 0), by_cudnn),
        (84, (9, 0), by_pallas),
        (256, (8, 9), by_pallas),
        (256, (9, 0), by_cudnn),
        (264, (10, 0), by_pallas),
    ):
        assert chosen(head_dim=dim, capability=capability) == expected, (dim, capability)
    assert chosen(dtype=jnp.float32) == by_pallas


def test_auto_leaves_out_what_cuda_miscompiles(monkeypatch):
    """Under the versions of CUDA that make wrong code of Mosaic's kernel cuDNN prefills on Hopper, too."""
    monkeypatch.setattr("pallas_kernels._compat_mosaic.cuda_version", lambda: 12090)
    assert chosen(capability=(9, 0)) == PrefillDecodeImplementations(prefill=CUDNN, decode=PALLAS)


def test_asked_for():
    assert chosen("xla") == PrefillDecodeImplementations(prefill=XLA, decode=XLA)
    assert chosen(PALLAS) == PrefillDecodeImplementations(prefill=PALLAS, decode=PALLAS)
    assert chosen("pallas", platform="cpu") == PrefillDecodeImplementations(
        prefill=INTERPRETED, decode=INTERPRETED
    )
    assert str(chosen("pallas", platform="cpu")) == "pallas (interpreted)"
    assert str(chosen("tpu", platform="cpu")) == "tpu (interpreted)"
    assert chosen("cudnn") == PrefillDecodeImplementations(prefill=CUDNN, decode=PALLAS)
    assert str(chosen("cudnn")) == "cudnn (prefill), pallas (decode)"
    for capability in ((9, 0), None):
        assert chosen("mosaic", capability=capability) == PrefillDecodeImplementations(
            prefill=MOSAIC, decode=PALLAS
        )
    assert chosen("mosaic", dtype=jnp.float16, head_dim=64, capability=(9, 0)).prefill is MOSAIC


def test_capability():
    """Devices say it as text, a CPU not at all."""
    for told, expected in (("9.0", (9, 0)), ("12.1", (12, 1)), (None, None), ("gfx942", None)):
        assert get_cuda_capability(mock.Mock(spec=jax.Device, compute_capability=told)) == expected
    assert get_cuda_capability(jax.devices("cpu")[0]) is None


POLICIES = {
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "rolling": jaxkv.StreamingLLM(budget=16, rolling_positions=True),
    "d2o": jaxkv.D2O(budget=16),
    "omnikv": jaxkv.OmniKV(budget=12, filter_layers=(0,), adjacent=0),
    "quest": jaxkv.Quest(budget=12, page=4, dense_layers=1),
    "snapkv, int8": jaxkv.SnapKV(budget=24, window=8, store="int8"),
    "h2o, int8": jaxkv.H2O(budget=16, store="int8"),
    "adakv, int4": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=24, window=8, store="int4")),
    "snapkv, mixed": jaxkv.SnapKV(budget=24, window=8, store="mixed"),
}


def both(model, ids, policy, implementation, **options):
    """What XLA and another implementation give: the same tokens, and the same rows kept."""
    kwargs = {"policy": policy, "max_new_tokens": 5, "stop_at_eos": False}
    plain = jaxkv.generate(model, ids, implementation="xla", **kwargs)
    other = jaxkv.generate(model, ids, implementation=implementation, **kwargs, **options)
    for ours, theirs in zip(
        (each.tokens for each in other), (each.tokens for each in plain), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert tiny.kept(other.cache) == tiny.kept(plain.cache)
    interpreted = " (interpreted)" if jax.default_backend() == "cpu" else ""
    found = plain.stats.attention, other.stats.attention
    assert found == ("xla", f"{implementation}{interpreted}")
    return plain.cache.pools, other.cache.pools


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "snapkv, int8"])
def test_kernels_generate_what_xla_does(name):
    """Prefill, compression and decoding of two prompts, one of fewer tokens than a window: same rows, same tokens."""
    # Rows in 4 bits have a kernel for heads of whole pairs of groups, and another form of words from 128 elements on.
    wide = {"int4": 128, "mixed": 64}.get(POLICIES[name].store)
    model = tiny.tiny(
        tiny.shape(layers=2, kv_heads=2, group=3, dim=wide) if wide else tiny.TWO_LAYERS
    )
    plain, kernels = both(model, tiny.prompts(0, [37, 5]), POLICIES[name], "pallas")
    for ours, theirs in zip(kernels, plain, strict=True):
        for one, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
            one, other = np.asarray(one), np.asarray(other)
            apart = np.abs(one - other)
            if not wide:
                assert apart.max() <= 1e-4
                continue
            # A number half way between two codes is rounded up by one backend and down by the other: rarely, one step.
            assert (apart > 4e-3).mean() < 1e-3 and apart.max() <= np.ptp(other) / 15


def test_kernels_answer_a_question_on_a_cache():
    """Several queries over a pool, merged with the causal part."""
    model = tiny.tiny(tiny.TWO_LAYERS)
    document, question = tiny.prompts(1, [37, 21]), tiny.prompts(2, [7, 3])
    cache = jaxkv.prefill(model, document, policy=POLICIES["adakv"], implementation="pallas")
    answers = [
        jaxkv.generate(
            model, question, cache=cache, max_new_tokens=4, implementation=each, stop_at_eos=False
        )
        for each in ("xla", "pallas")
    ]
    for ours, theirs in zip(
        (each.tokens for each in answers[1]), (each.tokens for each in answers[0]), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_kernels_keep_rows_of_16_bits():
    """Interpreted on a CPU: a prefill has the rows that they sample."""
    model, ids = tiny.tiny(tiny.TWO_LAYERS, dtype="bfloat16"), tiny.prompts(5, [7, 4])
    drawn = jaxkv.generate(model, ids, implementation="pallas", max_new_tokens=6, stop_at_eos=False)
    whole = [
        [*prompt, *answer]
        for prompt, answer in zip(ids, (each.tokens for each in drawn), strict=True)
    ]
    expected = jaxkv.prefill(model, whole, implementation="xla")
    for ours, theirs in zip(tiny.segments(drawn.cache), tiny.segments(expected), strict=True):
        assert ours.pos.tolist() == theirs.pos.tolist()
        for name in ("k", "v"):
            mine, its = (np.asarray(getattr(each, name), np.float32) for each in (ours, theirs))
            np.testing.assert_allclose(mine, its, atol=0.25, err_msg=name)
