"""SmolLM2, three kv heads, on meshes of three devices: the tokens and rows of one device.

One policy runs through all of its layers, the others through some: each layer is compiled, for one and for three.
"""

import functools

import pytest
import running
from meshes import mesh_of

import jaxkv
from jaxkv.testing import segments

LAYERS = 30
POLICIES = {
    "adakv": (jaxkv.AdaKV(base=jaxkv.SnapKV(budget=96), capacity=3.0), LAYERS),
    "d2o": (jaxkv.D2O(budget=96), 8),
}


@functools.cache
def answers(name, mesh=None):
    """Tokens drawn after three prompts of unequal length, and the positions that each segment holds behind them."""
    ids = running.archive("parity/p600.npz")["input_ids"].tolist()
    policy, layers = POLICIES[name]
    made = jaxkv.generate(
        running.smollm2() if layers == LAYERS else running.lowest_layers(layers),
        [ids[:200], ids[200:500], ids[500:600]],
        policy=policy,
        max_new_tokens=8,
        stop_at_eos=False,
        mesh=None if mesh is None else mesh_of(*mesh),
    )
    return [each.tolist() for each in made.tokens], [
        sorted(part.pos.tolist()) for part in segments(made.cache)
    ]


@pytest.mark.real
@pytest.mark.parametrize("name, mesh", [("adakv", (1, 3)), ("d2o", (3, 1))])
def test_the_real_model_on_three_devices(name, mesh):
    assert answers(name, mesh) == answers(name)
