"""Which implementation runs where, and that the kernels give what XLA gives through the whole of prefill and decode."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_windows
import tiny

import jaxkv
from jaxkv.attention import Implementation, Implementations, capability_of, choose
from jaxkv.planning.traced_programs import TraceInputs, abstract_model, traced_loop

XLA, PALLAS, CUDNN = Implementation.XLA, Implementation.PALLAS, Implementation.CUDNN
INTERPRETED, MOSAIC = Implementation.INTERPRETED, Implementation.MOSAIC
TPU = Implementation.TPU


def chosen(asked="auto", *, platform="gpu", dtype=jnp.bfloat16, head_dim=128, capability=(8, 0)):
    return choose(
        asked, platform=platform, dtype=jnp.dtype(dtype), head_dim=head_dim, capability=capability
    )


def test_auto(monkeypatch):
    monkeypatch.setattr("pallas_kernels._compat_mosaic.cuda_version", lambda: None)
    assert chosen(platform="cpu") == Implementations(prefill=XLA, decode=XLA)
    for dtype, dim in ((jnp.bfloat16, 128), (jnp.float32, 80)):
        assert chosen(platform="tpu", dtype=dtype, head_dim=dim) == Implementations(
            prefill=TPU, decode=TPU
        )
    by_cudnn, by_pallas = (
        Implementations(prefill=CUDNN, decode=PALLAS),
        Implementations(prefill=PALLAS, decode=PALLAS),
    )
    by_mosaic = Implementations(prefill=MOSAIC, decode=PALLAS)
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
    assert chosen(capability=(9, 0)) == Implementations(prefill=CUDNN, decode=PALLAS)


def test_asked_for():
    assert chosen("xla") == Implementations(prefill=XLA, decode=XLA)
    assert chosen(PALLAS) == Implementations(prefill=PALLAS, decode=PALLAS)
    assert chosen("pallas", platform="cpu") == Implementations(
        prefill=INTERPRETED, decode=INTERPRETED
    )
    assert str(chosen("pallas", platform="cpu")) == "pallas (interpreted)"
    assert str(chosen("tpu", platform="cpu")) == "tpu (interpreted)"
    assert chosen("cudnn") == Implementations(prefill=CUDNN, decode=PALLAS)
    assert str(chosen("cudnn")) == "cudnn (prefill), pallas (decode)"
    for capability in ((9, 0), None):
        assert chosen("mosaic", capability=capability) == Implementations(
            prefill=MOSAIC, decode=PALLAS
        )
    assert chosen("mosaic", dtype=jnp.float16, head_dim=64, capability=(9, 0)).prefill is MOSAIC


def test_capability():
    """Devices say it as text, a CPU not at all."""
    for told, expected in (("9.0", (9, 0)), ("12.1", (12, 1)), (None, None), ("gfx942", None)):
        assert capability_of(mock.Mock(spec=jax.Device, compute_capability=told)) == expected
    assert capability_of(jax.devices("cpu")[0]) is None


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


# A policy of each kind of step: appended rows in pools of their own, evicted and merged rows in one pool, pages, codes.
ON_TPUS = ["adakv", "d2o", "quest", "snapkv, int8"]


on_a_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a TPU's kernels are interpreted on a CPU alone"
)


@on_a_cpu
@pytest.mark.parametrize("name", ON_TPUS)
def test_a_tpus_kernels_generate_what_xla_does(name):
    """Prefill, compression and decoding of two unequal prompts: same rows kept, same tokens."""
    ids = tiny.prompts(0, [37, 21])
    plain, kernels = both(tiny.tiny(tiny.TWO_LAYERS), ids, POLICIES[name], "tpu")
    for ours, theirs in zip(kernels, plain, strict=True):
        for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-4)


@on_a_cpu
def test_a_tpus_kernels_on_a_mesh():
    """Each of two devices runs them over its own heads: same rows kept, same tokens."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    model, ids = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(0, [37, 21])
    both(model, ids, POLICIES["snapkv, int8"], "tpu", mesh=mesh)


@on_a_cpu
def test_layers_with_windows_on_a_tpu():
    """Sliding-window layers, whose rows are in rings, read and write them by the kernel."""
    policy = jaxkv.SnapKV(budget=16, window=6)
    both(tiny.tiny(test_windows.SHAPE), test_windows.prompts(), policy, "tpu")


@pytest.mark.usefixtures("as_users_call")
def test_a_tpus_programs_have_its_kernels():
    """A layer of a prompt in bfloat16 is prefilled by splash attention; a step appends and attends by a kernel."""
    flat = abstract_model(tiny.shape(layers=2, kv_heads=2, group=2, dim=128), "bfloat16")
    given = {"policy": jaxkv.SnapKV(budget=64, window=8), "batch": 2, "tokens": 256, "new": 16}
    work = TraceInputs(flat=flat, implementation=TPU, **given)
    layer = next(each for each in work.prefill.calls if each.name == "layer")
    with_kernels = [layer.traced, traced_loop(work)[0]]
    prefill, decode = (each.lower(lowering_platforms=("tpu",)).as_text() for each in with_kernels)
    assert (
        "splash_mha" in prefill
        and "tpu_decode" in decode
        and "stablehlo.bitcast_convert" not in prefill
    )
    for store, joins in (("int8", True), ("int4", False), ("mixed", False)):
        policy = jaxkv.SnapKV(budget=240, window=8, store=store)
        traced, _ = traced_loop(dataclasses.replace(work, policy=policy, tokens=512))
        assert ("tpu_decode" in traced.lower(lowering_platforms=("tpu",)).as_text()) == joins


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
