"""Kernels for TPUs through whole models, against XLA: interpreted and lowered. `pytest --gpu` leaves this file out."""

import dataclasses

import jax
import numpy as np
import pytest
import test_windows
import tiny
from test_implementations import POLICIES, both

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.planning.traced_programs import TraceInputs, build_abstract_model, trace_planned_loop

# A policy of each kind of step: appended rows in pools of their own, evicted and merged rows in one pool, pages, codes.
ON_TPUS = ["adakv", "d2o", "quest", "snapkv, int8"]


@pytest.mark.parametrize("name", ON_TPUS)
def test_a_tpus_kernels_generate_what_xla_does(name):
    """Prefill, compression and decoding of two unequal prompts: same rows kept, same tokens."""
    ids = tiny.prompts(0, [37, 21])
    plain, kernels = both(tiny.tiny(tiny.TWO_LAYERS), ids, POLICIES[name], "tpu")
    for ours, theirs in zip(kernels, plain, strict=True):
        for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-4)


def test_a_tpus_kernels_on_a_mesh():
    """Each of two devices runs them over its own heads: same rows kept, same tokens."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    model, ids = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(0, [37, 21])
    both(model, ids, POLICIES["snapkv, int8"], "tpu", mesh=mesh)


def test_layers_with_windows_on_a_tpu():
    """Sliding-window layers, whose entries are in rings, read and write them by the kernel."""
    policy = jaxkv.SnapKV(budget=16, window=6)
    both(tiny.tiny(test_windows.SHAPE), test_windows.prompts(), policy, "tpu")


@pytest.mark.usefixtures("as_users_call")
def test_a_tpus_programs_have_its_kernels():
    """A layer of a prompt in bfloat16 is prefilled by splash attention; a step appends and attends by a kernel."""
    flat = build_abstract_model(tiny.shape(layers=2, kv_heads=2, group=2, dim=128), "bfloat16")
    given = {"policy": jaxkv.SnapKV(budget=64, window=8), "batch": 2, "tokens": 256, "new": 16}
    work = TraceInputs(flat=flat, implementation=Implementation.TPU, **given)
    layer = next(each for each in work.traced_prefill.calls if each.name == "layer")
    with_kernels = [layer.traced, trace_planned_loop(work)[0]]
    prefill, decode = (each.lower(lowering_platforms=("tpu",)).as_text() for each in with_kernels)
    assert (
        "splash_mha" in prefill
        and "tpu_decode" in decode
        and "stablehlo.bitcast_convert" not in prefill
    )
    for store, joins in (("int8", True), ("int4", False), ("mixed", False)):
        policy = jaxkv.SnapKV(budget=240, window=8, store=store)
        traced, _ = trace_planned_loop(dataclasses.replace(work, policy=policy, tokens=512))
        assert ("tpu_decode" in traced.lower(lowering_platforms=("tpu",)).as_text()) == joins
