"""Programs before the first block and after the last one: token embeddings and logits."""

from jaxtyping import Array, Float, Int

from jaxkv.attention import Implementation, get_attention_backend
from jaxkv.models.split_decoder import DecoderGraphs, Leaves
from jaxkv.sharding.sharded_program import sharded_jit


@sharded_jit(static=("graphs", "implementation"), on="graphs")
def embed_tokens(
    ends: Leaves,
    tokens: Int[Array, "B N"],
    *,
    graphs: DecoderGraphs,
    implementation: Implementation = Implementation.XLA,
) -> Float[Array, "B N E"]:
    """Compiled: return the embeddings `[B, N, E]` of token ids, the hidden states before the first block."""
    return graphs.rebuild_embedding_and_head(ends).embed_tokens(
        tokens, in_blocks=get_attention_backend(implementation).can.embeds_in_blocks
    )


@sharded_jit(static=("graphs",), on="graphs")
def compute_logits(
    ends: Leaves, x: Float[Array, "B E"], *, graphs: DecoderGraphs
) -> Float[Array, "B V"]:
    """Compiled: return float32 next-token logits `[B, V]` from hidden states `[B, E]` after the last block."""
    return graphs.rebuild_embedding_and_head(ends).compute_logits(x)
