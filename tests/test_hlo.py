"""What is read off programs that are compiled for devices that are not there."""

import jax.numpy as jnp
from jaxtyping import Array, Float
from meshes import mesh_of, model_of

from benchmarks import hlo
from jaxkv.sharding.collectives import all_gather_shards, sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.parameters import make_model_mesh
from jaxkv.sharding.sharded_program import sharded_jit

# As XLA writes it for GPUs, where what travels is begun and waited for apart.
TEXT = """HloModule jit__loop, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, must-alias) }, \
entry_computation_layout={(s32[4]{0}, bf16[4,2304,128]{2,1,0}, /*index=2*/f32[4,2304]{1,0})->(bf16[4,2304,128]{2,1,0})}
  %sum.1 = f32[4,1,8192]{2,1,0} all-reduce-start(%x), channel_id=1
  %sum.3 = ((f32[4,1,8192]{2,1,0}), f32[4,1,8192]{2,1,0}) all-reduce-start(%u), channel_id=1
  %done.1 = f32[4,1,8192]{2,1,0} all-reduce-done(%sum.1)
  %sum.2 = f32[4,1,8192]{2,1,0} all-reduce-start(%y), channel_id=2
  %both = (f32[4]{0}, s32[]) all-reduce(%z, %w), channel_id=3
  %logits = (f32[4,16032]{0,1}, f32[4,128256]{0,1}) all-gather-start(%l), channel_id=4
"""


def test_text():
    assert hlo.collectives(TEXT) == {
        ("all-reduce", (("f32", (4, 1, 8192)),)): 3,
        ("all-reduce", (("f32", (4,)), ("s32", ()))): 1,
        ("all-gather", (("f32", (4, 128256)),)): 1,
    }
    assert hlo.shown(hlo.arrays_in("(f32[4,2]{1,0}, pred[])")) == "f32[4,2] pred[]"


@sharded_jit(static=("axes",), donate=("x",))
def _scaled(
    x: Float[Array, "B V"], y: Float[Array, "B E"], *, axes: ShardingMesh | None
) -> Float[Array, "B V"]:
    sums = sum_over_devices(y, axes).sum(axis=1, keepdims=True)
    return x + sums * all_gather_shards(x, "V", 1, axes).max(axis=1, keepdims=True)


def test_a_compiled_program():
    axes = ShardingMesh(mesh=make_model_mesh(mesh_of(2, 4), model_of(4).config))
    text = _scaled.trace(jnp.ones((2, 8)), jnp.ones((2, 3)), axes=axes).lower().compile().as_text()
    assert hlo.collectives(text) == {
        ("all-reduce", (("f32", (1, 3)),)): 1,
        ("all-gather", (("f32", (1, 8)),)): 1,
    }
