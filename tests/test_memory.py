"""No memory for what was asked: rejected before anything is allocated, with the bytes and what to change."""

import math
import re
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from meshes import mesh_of, model_of, prompts

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.plan import check_memory, plan_prefill
from jaxkv.engine.prefill_bytes import WORKSPACE
from jaxkv.machine import memory

MODELS = Path(__file__).parent / "golden" / "models"
POLICY = jaxkv.SnapKV(budget=16, window=4)
IDS = list(range(3, 43))


@pytest.fixture(scope="module")
def model():
    return jaxkv.load(MODELS / "llama_gqa")


def refused(message):
    return pytest.raises(MemoryError, match=message)


def test_no_memory_for_the_plan(model, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    needed = plan_prefill(model.config, POLICY, [40])
    with refused(f"needs {needed.peak_bytes:,} bytes .*{needed.cache_bytes:,} .* 1,000 free"):
        jaxkv.prefill(model, IDS, policy=POLICY)
    with refused(r"the plan needs [\d,]+ bytes .* 1,000 free: lower"):
        jaxkv.generate(model, IDS, policy=POLICY, max_new_tokens=4)
    monkeypatch.undo()
    assert int(jaxkv.prefill(model, IDS, policy=POLICY).seen[0]) == 40


def test_no_memory_for_rows_that_wait_in_host_memory(model, monkeypatch):
    needed = plan_prefill(model.config, jaxkv.BrutalOffload(resident_layers=1), [40])
    total = needed.peak_bytes + needed.host_bytes
    # On a CPU both kinds of memory are one.
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: total - 1)
    with refused(f"the plan needs {total:,} bytes"):
        check_memory(needed)
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: total)
    check_memory(needed)
    gpu = mock.Mock(spec=jax.Device, platform="gpu")
    gpu.memory_stats.return_value = {"bytes_limit": needed.peak_bytes, "bytes_in_use": 0}
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: needed.host_bytes)
    check_memory(needed, gpu)
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: needed.host_bytes - 1)
    with refused(
        f"host_bytes={needed.host_bytes:,}: the plan needs more host memory.*Offload fewer layers"
    ):
        check_memory(needed, gpu)


@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_no_memory_for_weights(monkeypatch, mesh):
    path = MODELS / "llama_gqa8"
    whole = sum(leaf.nbytes for leaf in leaves_of(path))
    options = {}
    if mesh is not None:
        devices = jax.devices()[: math.prod(mesh)]
        options["mesh"] = jax.make_mesh(mesh, ("data", "model"), devices=devices)
    # A CPU's devices have one memory: two groups of devices hold the model twice, and norms lie whole on all of them.
    held = sum(
        shard.data.nbytes
        for leaf in leaves_of(path, **options)
        for shard in leaf.addressable_shards
    )
    assert held >= whole * (mesh or (1,))[0]
    monkeypatch.setattr(memory, "available_bytes", lambda device: held)
    jaxkv.load(path, **options)
    monkeypatch.setattr(memory, "available_bytes", lambda device: held - 1)
    what = "the model" if mesh is None else "a device's shard of the model"
    with refused(f"{what} needs {held:,} bytes .* has {held - 1:,} free: use .*narrower dtype"):
        jaxkv.load(path, **options)


def leaves_of(path, **options):
    return jax.tree.leaves(nnx.state(jaxkv.load(path, **options).decoder, nnx.Param))


def test_no_memory_for_the_plan_of_a_mesh(monkeypatch):
    """Devices of a CPU share its memory: together they need no less than one alone."""
    of, ids = model_of(4), prompts(5, (61, 37))
    needed = []
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1)
    for model in (of, of.on(mesh_of(2, 4))):
        with pytest.raises(MemoryError, match=r"the plan needs [\d,]+ bytes") as refused:
            jaxkv.prefill(model, ids, policy=jaxkv.FullKV(), progress=False)
        needed.append(
            int(re.search(r"needs ([\d,]+)", str(refused.value)).group(1).replace(",", ""))
        )
    assert needed[0] <= needed[1] <= 3 * needed[0]


def test_prefill_runs_ahead_where_memory_allows(monkeypatch):
    """It waits for each layer unless a device's own allocator has room to spare, and gives the same whichever way."""
    model, ids = tiny.tiny(tiny.MODELS["gqa4"]), tiny.prompts(0, [40, 21])
    needed = plan_prefill(model.config, POLICY, [40, 21])
    each = needed.peak_bytes - needed.cache_bytes
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(type(x)) or wait(x))
    found = {}
    for spare, waits in (
        (None, 4),
        (needed.peak_bytes - 1, 4),
        (needed.peak_bytes + 2 * each, 2),
        (1 << 40, 0),
    ):
        monkeypatch.setattr(memory, "get_allocator_bytes", lambda device, spare=spare: spare)
        waited.clear()
        found[spare] = jaxkv.Session(model, POLICY).prefill(ids, needed=needed)
        assert waited.count(EntryPool) == waits, spare
    for ours, theirs in zip(found[1 << 40].pools, found[None].pools, strict=True):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert (a == b).all()


def test_the_plan_counts_what_a_gpu_takes_all_prompts_together_for(model):
    """Queries and output of long prompts, the MLP's block for short ones; cuDNN has queries in another order, too."""
    config = model.config
    xla, pallas, cudnn = (
        [plan_prefill(config, POLICY, [40, n], implementation=each) for n in (40, 262144)]
        for each in (Implementation.XLA, Implementation.PALLAS, Implementation.CUDNN)
    )
    tokens, queries = 2 * 64, 2 * 262144 * config.heads * config.head_dim * 4
    hidden, kv = tokens * config.embed * 4, 2 * tokens * config.kv_heads * config.head_dim * 4
    block = tokens * (12 * config.hidden + 4 * config.embed) + hidden + kv
    prefilling = [each.peak_bytes - each.cache_bytes for each in (pallas[0], pallas[1], cudnn[1])]
    assert block < prefilling[0] - WORKSPACE < 1.4 * block
    assert prefilling[2] - prefilling[1] == queries
    assert all(a.peak_bytes < b.peak_bytes for a, b in zip(xla, pallas, strict=True))
    sessions = [jaxkv.Session(model, POLICY, implementation=each) for each in ("xla", "pallas")]
    assert [each.plan(np.array([40, 40])).peak_bytes for each in sessions] == [
        xla[0].peak_bytes,
        pallas[0].peak_bytes,
    ]
