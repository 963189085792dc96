"""SmolLM2, three kv heads, on meshes of three devices: the tokens and rows of one device.

Through its lowest layers: each is compiled, for one and for three.
"""

import functools

import pytest
import running
from meshes import mesh_of

import jaxkv
from jaxkv.testing import segments

LAYERS = 8
POLICIES = {
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=96), capacity=3.0),
    "d2o": jaxkv.D2O(budget=96),
}


@functools.cache
def answers(name, mesh=None):
    """Tokens sampled after three prompts of unequal length, and the positions that each segment holds behind them."""
    ids = running.archive("parity/p600.npz")["input_ids"].tolist()
    made = jaxkv.generate(
        running.lowest_layers(LAYERS),
        [ids[:200], ids[200:500], ids[500:600]],
        policy=POLICIES[name],
        max_new_tokens=8,
        stop_at_eos=False,
        mesh=None if mesh is None else mesh_of(*mesh),
    )
    return [each.tokens.tolist() for each in made], [
        sorted(part.pos.tolist()) for part in segments(made.cache)
    ]


@pytest.mark.real
@pytest.mark.parametrize("name, mesh", [("adakv", (1, 3)), ("d2o", (3, 1))])
def test_the_real_model_on_three_devices(name, mesh):
    assert answers(name, mesh) == answers(name)
