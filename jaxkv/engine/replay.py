"""Second pass over prompts (KVzip): runs them again, chunk by chunk, on top of their full cache.

The pass yields the maximum attention that each entry receives, from which a scorer computes scores. Its own entries are
discarded. For gradients (KVgrad) each chunk also runs backwards through the layers, each of which computes its
activations once more.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxkv import attention
from jaxkv._errors import require
from jaxkv.attention import Implementation, get_attention_backend
from jaxkv.attention.steps import GatheredEntries
from jaxkv.attention.xla import SegmentRanges, exact_einsum
from jaxkv.engine.embedding import embed_tokens
from jaxkv.engine.layers.sliding_window import attend_sliding_window
from jaxkv.engine.prefill_layer import LayerOut, advance_states, compute_queries_at
from jaxkv.engine.progress import Walk
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.rope import RopeTables, compute_rope_tables
from jaxkv.models.split_decoder import DecoderGraphs, Leaves, SplitDecoder
from jaxkv.models.states import DeltaState
from jaxkv.policies.scorer import (
    PromptReplay,
    ReplayWeighting,
    compute_reference_positions,
)
from jaxkv.sharding.collectives import average_over_devices
from jaxkv.sharding.mesh import get_array_sharding, place_host_array
from jaxkv.sharding.sharded_program import sharded_jit
from jaxkv.text.tokenizer import ChatTokenizer

# Maximum number of tokens per call of a layer.
MOST = 512


class SecondPassTexts(NamedTuple):
    """Token ids that a second pass runs before each chunk: `first` (later chunks: `following`), then `closing`."""

    first: tuple[int, ...]
    following: tuple[int, ...]
    closing: tuple[int, ...]


class PaddedPrompts(NamedTuple):
    """Right-padded prompts on the host, their numbers of tokens, and the texts of a second pass, or None."""

    tokens: Int[np.ndarray, "B S"]
    lengths: Int[np.ndarray, " B"]
    texts: SecondPassTexts | None = None


def encode_second_pass_texts(
    asked: PromptReplay | None, text: ChatTokenizer | None, config: ModelConfig
) -> SecondPassTexts | None:
    """Return a second pass's texts as token ids, None without a pass; ValueError for invalid ids or no tokenizer."""
    if asked is None:
        return None
    closing = asked.closing
    if closing is None:
        closing = "" if text is None else text.turn_texts.closing if text.has_template else "\n"
    found = []
    for name, given in (
        ("first", asked.first),
        ("following", asked.following),
        ("closing", closing),
    ):
        if isinstance(given, str) and given:
            require(
                text is not None, name, given, "the checkpoint has no tokenizer: pass token ids"
            )
            assert text is not None
            given = tuple(text.encode(given, bos=False))
        ids = tuple(int(each) for each in given)
        require(
            all(each < config.vocab for each in ids),
            name,
            ids,
            f"token ids outside of [0, {config.vocab}): give ids of this model's vocabulary",
        )
        found.append(ids)
    return SecondPassTexts(*found)


def count_second_pass_tokens(asked: PromptReplay, texts: SecondPassTexts, padded_len: int) -> int:
    """Return the tokens per prompt and chunk of a second pass: texts, previous chunk's end, chunk, padding."""
    before = max(len(texts.first), len(texts.following) + min(asked.tail, padded_len)) + len(
        texts.closing
    )
    tokens = before + min(asked.chunk, padded_len)
    blocks = -(-tokens // MOST)
    return blocks * -(-tokens // blocks)


def build_second_pass_chunks(
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    asked: PromptReplay,
    texts: SecondPassTexts,
) -> Iterator[tuple[int, Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]]:
    """Yield each chunk's first position, the token ids `[B, N]` to run for it, and the number `[B]` of valid ones."""
    batch, padded_len = tokens.shape
    size = min(asked.chunk, padded_len)
    for first in range(0, int(lengths.max()), size):
        ids = np.zeros((batch, count_second_pass_tokens(asked, texts, padded_len)), np.int32)
        count = np.zeros(batch, np.int32)
        for row in np.flatnonzero(lengths > first):
            before = [*texts.first]
            if first:
                before = [*texts.following, *tokens[row, max(0, first - asked.tail) : first]]
            line = [*before, *texts.closing, *tokens[row, first : min(first + size, lengths[row])]]
            ids[row, : len(line)] = line
            count[row] = len(line)
        yield first, ids, count


def compute_peak_attention(
    flat: SplitDecoder,
    ran: Mapping[int, LayerOut],
    padded: PaddedPrompts,
    asked: PromptReplay,
    *,
    implementation: Implementation,
    worth: float,
) -> Walk[list[Float[Array, "B K S"]]]:
    """Generator: run prompts again over their entries in `ran`; return each entry's peak attention by layer.

    Reference queries in `ran` become those of the tokens that repeat theirs. Yields progress in equal parts that sum
    to `worth`, the second pass's share of the layers' progress.
    """
    tokens, lengths, texts = padded
    layers = len(flat.blocks)
    axes = flat.axes
    assert texts is not None
    length = place_host_array(lengths, "B", axes, jnp.int32)
    shape = ran[0].k.shape[:3]
    # Each device creates its own part.
    peaks = [
        jnp.zeros(shape, jnp.float32, device=get_array_sharding("B K S", shape, axes))
        for _ in range(layers)
    ]
    steps = layers * (1 + asked.runs_backwards)
    share = worth / (steps * -(-int(lengths.max()) // min(asked.chunk, tokens.shape[1])))
    for first, ids, count in build_second_pass_chunks(tokens, lengths, asked, texts):
        x = embed_tokens(flat.ends, place_host_array(ids, "B N", axes), graphs=flat.graphs)
        held = place_host_array(count, "B", axes)
        entered = list[Array]()
        for step in range(steps):
            # Up, and for gradients down again.
            index = min(step, 2 * layers - 1 - step)
            # The top layer's output is the gradient of half the sum of its squares.
            gradient = (x,) * (step >= layers)
            if gradient:
                x = entered.pop()
            elif asked.runs_backwards:
                entered.append(jnp.copy(x))
            extras = ran[index].extras
            own = (extras["references"],) if "references" in extras and not gradient else ()
            x, peaks[index], repeated = _rerun_block(
                flat.blocks[index],
                x,
                gradient,
                own,
                held,
                (ran[index].k, ran[index].v),
                ran[index].states,
                length,
                jnp.int32(first),
                peaks[index],
                graphs=flat.get_layer_graphs(index),
                asked=asked,
                implementation=implementation,
            )
            for queries in repeated:
                extras["references"] = queries
            yield share
    return peaks


@sharded_jit(
    static=("graphs", "asked", "implementation"), donate=("x", "references", "peaks"), on="graphs"
)
def _rerun_block(
    leaves: Leaves,
    x: Float[Array, "B N E"],
    gradient: tuple[Float[Array, "B N E"], ...],
    references: tuple[Float[Array, "B K G r D"], ...],
    count: Int[Array, " B"],
    rows: tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]],
    states: tuple[DeltaState, ...],
    length: Int[Array, " B"],
    first: Int[Array, ""],
    peaks: Float[Array, "B K S"],
    *,
    graphs: DecoderGraphs,
    asked: PromptReplay,
    implementation: Implementation,
) -> tuple[Float[Array, "B N E"], Float[Array, "B K S"], tuple[Float[Array, "B K G r D"], ...]]:
    """Compiled: run a block over N tokens that repeat a chunk; return hidden states, `peaks`, `references`; donate all.

    `rows` are the prompt's keys and values, `states` its states. `count` of the tokens are valid, and the chunk begins
    at position `first`. `peaks` of a sliding-window layer are unchanged. With the `gradient` of the block's output,
    returns that of its input in place of hidden states; if gradients are asked for, only this updates `peaks`. Queries
    of the chunk's tokens replace those of `references`.
    """
    block = graphs.rebuild_block(leaves)
    x, _ = advance_states(block, x, states, count)
    window = graphs.spec.sliding_window
    shaping = block.logits_shaping
    softcap = graphs.spec.softcap
    batch, heads, padded_len, dim = rows[0].shape
    tokens, width = x.shape[1:]
    reached = window or padded_len + tokens
    size = tokens // -(-tokens // MOST)
    backend = get_attention_backend(implementation)
    put = lax.dynamic_update_slice
    by = compute_rope_tables(
        length[:, None] + jnp.arange(tokens, dtype=jnp.int32),
        graphs.spec.rope,
        graphs.spec.get_head_dim(dim),
    )
    reach = SegmentRanges.make_strided_ranges(
        jnp.broadcast_to(length[:, None], (batch, heads)), padded_len
    )
    pool = GatheredEntries(*(each.reshape(batch, heads * padded_len, dim) for each in rows))
    attend_near = partial(
        attend_sliding_window,
        rows=pool,
        reach=reach,
        size=min(reached, padded_len),
        window=reached,
        shaping=shaping,
    )
    chunk = min(asked.chunk, padded_len)
    few = min(asked.sinks, padded_len)
    references = tuple(
        _replace_reference_queries(block, x, each, length, count, first, chunk)
        for each in references
    )
    # If the last chunk would end beyond the padded length, its slice begins earlier; the previous chunk is masked.
    begin = jnp.minimum(first, padded_len - chunk)
    there = begin + jnp.arange(chunk, dtype=jnp.int32)
    mine = (there >= jnp.maximum(first, few)) & (there < length[:, None])
    inside = jnp.concatenate([jnp.arange(few, dtype=jnp.int32) < length[:, None], mine], axis=1)
    read, shown = (
        jnp.concatenate([each[:, :, :few], _slice_entries(each, begin, chunk)], axis=2)
        for each in rows
    )
    scored = window is None and bool(gradient) == asked.runs_backwards
    weighted = scored and asked.weighting is not ReplayWeighting.NONE
    by_row: Any = _compute_projected_norms(block, shown) if weighted else None

    def attend_to_prompt(part: Array) -> tuple[Array, Array]:
        """Attend with rotated queries to the prompt's entries; return attention output and log-sum-exp."""
        flat = part.reshape(batch, heads, -1, dim)
        out, lse = backend.attend_to_segments(
            flat, pool, reach, shaping=shaping.without_sink_logits
        )
        return out.reshape(part.shape), lse.reshape(part.shape[:-1])

    def attend_to_own(q: Array, k: Array, v: Array, first: Array) -> tuple[Array, Array]:
        """Attend with the queries from `first` on to the pass' tokens; return attention output and log-sum-exp."""
        attend = partial(attention.compute_causal_attention, first=first, softcap=softcap)
        return shaping.include_sink_logits(*lax.map(lambda a: attend(*a), (q, k, v)))

    def project(x: Array, turn: RopeTables) -> tuple[Array, Array, Array, Array]:
        """Return tokens' normed hidden states, rotated queries and keys, and values."""
        normed = block.normalise_for_attention(x)
        raw, new = block.compute_keys_values(normed)
        k = block.rotate_keys(raw, turn, x.dtype)
        return normed, block.compute_rotated_queries(normed, turn), k, new

    def run_tokens(x: Array, residual: Array) -> tuple[Array, tuple[Array, ...]]:
        """Run the layer on all tokens by operations with gradients; return hidden states; queries, keys and values."""
        _, q, k, v = project(x, by)
        out = attend_near(q, (k, v), count)
        return block.apply_output_and_mlp(residual, out), (q, k, v)

    def run_token_block(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Run the layer on a token block; return updated hidden states, keys, values and peak attention."""
        x, k, v, most = carry
        at = index * size
        part = lax.dynamic_slice_in_dim(x, at, size, axis=1)
        normed, q, *new = project(part, by.slice_positions(at, size))
        k, v = (put(to, each, (0, 0, at, 0)) for to, each in zip((k, v), new, strict=True))
        if window is not None:
            out = attend_near(q, (k, v), count, first=at)
            return put(x, block.apply_output_and_mlp(part, out), (0, at, 0)), k, v, most
        own, own_lse = attend_to_own(q, k, v, at)
        x = put(
            x,
            block.apply_output_and_mlp(
                part, attention.merge_attention_outputs(*attend_to_prompt(q), own, own_lse)
            ),
            (0, at, 0),
        )
        if not scored:
            return x, k, v, most
        weights = None if by_row is None else (1 / _compute_l2_norms(normed), by_row)
        found = attention.max_attention_per_key(
            q, own_lse, read, count - at, inside, weights, softcap=softcap
        )
        return x, k, v, jnp.maximum(most, found)

    most = jnp.zeros((batch, heads, few + chunk), jnp.float32)
    if gradient:
        _, pull_back, (q, k, v) = jax.vjp(run_tokens, x, x, has_aux=True)
        real = jnp.arange(tokens, dtype=jnp.int32) < count[:, None]
        # Each device has the part of a gradient, times their number, that passes through its heads.
        through, after = (
            average_over_devices(each, "H", block.axes)
            for each in pull_back(jnp.where(real[..., None], gradient[0], 0))
        )
        x = through + after
        if scored:
            _, own_lse = attend_to_own(q, k, v, jnp.int32(0))
            weights = (_compute_l2_norms(after), by_row)
            most = attention.max_attention_per_key(
                q, own_lse, read, count, inside, weights, softcap=softcap
            )
    else:
        buffer = jnp.zeros((batch, heads, tokens, dim), x.dtype)
        carry = (x, buffer, buffer, most)
        x, _, _, most = lax.fori_loop(0, (count.max() + size - 1) // size, run_token_block, carry)
    new = jnp.maximum(_slice_entries(peaks, begin, chunk), most[..., few:])
    return x, lax.dynamic_update_slice_in_dim(peaks, new, begin, axis=2), references


def _replace_reference_queries(
    block: DecoderBlock,
    x: Float[Array, "B N E"],
    references: Float[Array, "B K G r D"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    first: Int[Array, ""],
    chunk: int,
) -> Float[Array, "B K G r D"]:
    """Return reference queries, with those of a chunk's tokens from the tokens of the pass that repeat them."""
    at = compute_reference_positions(length, references.shape[3])
    # The chunk's tokens are the last valid ones.
    begin = count - jnp.minimum(length - first, chunk)
    index = jnp.clip(at - first + begin[:, None], 0, x.shape[1] - 1)
    dim = block.spec.get_head_dim(references.shape[4])
    by = compute_rope_tables(length[:, None] + index, block.spec.rope, dim)
    new = compute_queries_at(block, x, index, by)
    mine = (at >= first) & (at < first + chunk)
    return jnp.where(mine[:, None, None, :, None], new, references)


def _slice_entries(
    array: Shaped[Array, "B K S ..."], begin: Int[Array, ""], size: int
) -> Shaped[Array, "B K C ..."]:
    """Return `size` consecutive entries of each kv head, from entry `begin` on, of an array `[B, K, S, ...]`."""
    return lax.dynamic_slice_in_dim(array, begin, size, axis=2)


def _compute_l2_norms(rows: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """Return float32 L2 norms along the last axis, at least 1e-12."""
    return jnp.maximum(jnp.sqrt((rows.astype(jnp.float32) ** 2).sum(axis=-1)), 1e-12)


def _compute_projected_norms(
    block: DecoderBlock, v: Float[Array, "B K C D"]
) -> Float[Array, "B K G C"]:
    """Return float32 L2 norms `[B, K, G, C]` of values after the output projection of each query head."""
    weight = block.attention.get_value_projection()
    # |v W|^2 = v (W W^T) v^T avoids an array of C entries of the model's width.
    gram = exact_einsum("ekgi,ekgj->kgij", weight, weight)
    wide = v.astype(jnp.float32)
    square = exact_einsum("bkci,kgij,bkcj->bkgc", wide, gram, wide)
    return jnp.sqrt(jnp.maximum(square, 0.0))
