"""Programs before the first block and after the last one: token embeddings and logits."""

from jaxtyping import Array, Float, Int

from jaxkv.attention import Implementation, backend_of
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.sharding.sharded_program import sharded_jit


@sharded_jit(static=("graphs", "implementation"), on="graphs")
def embed(
    ends: Leaves,
    tokens: Int[Array, "B N"],
    *,
    graphs: Graphs,
    implementation: Implementation = Implementation.XLA,
) -> Float[Array, "B N E"]:
    """Compiled: return embeddings `[B, N, E]` of token ids, the hidden states before the first block."""
    return graphs.ends(ends).embed(
        tokens, in_blocks=backend_of(implementation).can.embeds_in_blocks
    )


@sharded_jit(static=("graphs",), on="graphs")
def logits_of(ends: Leaves, x: Float[Array, "B E"], *, graphs: Graphs) -> Float[Array, "B V"]:
    """Compiled: return float32 next-token logits `[B, V]` from hidden states after the last block."""
    return graphs.ends(ends).logits(x)
