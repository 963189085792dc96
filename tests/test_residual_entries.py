"""The last appended entries of a 4-bit store, read as they were: an oracle in float64, batches, and errors."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.attention import LogitShaping
from jaxkv.cache import EntryPool, SegmentLayout
from jaxkv.cache.quantised import Int4Vectors, QuantisedStore
from jaxkv.cache.residual_entries import ResidualEntries
from jaxkv.engine.layers.binding import make_cache_layer
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.tokens import NewTokens, TokenProjections
from jaxkv.policies.parts import Parts

SIZE, PLACES, DIM = 4, 40, 16


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["wide"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class FewInt4(QuantisedStore):
    """As `ResidualInt4Store`, with fewer exact entries than the tests append."""

    keys = values = Int4Vectors
    transformed = True
    residual_length = SIZE


def attended(q, keys, values, sink):
    """Softmax attention of a query in float64, with a sink logit."""
    weights = np.exp(keys @ q / np.sqrt(DIM))
    return weights @ values / (weights.sum() + np.exp(sink))


@jax.jit
def advance(pool, length, seen, token, count, sinks):
    """Appends and attends with N tokens at `seen`, heads in segments of `PLACES` rows: output and pool."""
    positions = seen[:, None] + jnp.arange(token.k.shape[2], dtype=jnp.int32)
    layer = make_cache_layer(
        DecodeAttentionConfig(
            layout=SegmentLayout.EQUAL, reading=Parts().build_read_config((None,), 64)
        ),
        pool,
        jnp.zeros_like(length) + jnp.asarray([0, PLACES], jnp.int32),
        length,
        shaping=LogitShaping(sink_logits=sinks),
    )
    new = NewTokens(positions=positions, count=count)
    return layer.append_tokens_and_attend(token, StepState(new=new))


def test_a_layer_reads_the_last_entries_as_they_were_and_codes_before_them():
    """Steps of one token and of six, which some sequences skip; tokens that are taken back."""
    rng = np.random.default_rng(0)
    batch, heads, group = 2, 2, 3
    sinks = rng.normal(size=(heads, group))
    zeros = jnp.zeros((batch, heads * PLACES, DIM))
    length = jnp.zeros((batch, heads), jnp.int32)
    pool = EntryPool(
        store=FewInt4.encode_entries(zeros, zeros),
        pos=jnp.full((batch, heads * PLACES), -1, jnp.int32),
        residual=ResidualEntries.make_empty(length, SIZE, DIM, jnp.dtype(jnp.float32)),
    )
    # By sequence: each entry exact and rounded, and which ones are read exactly.
    entries = [[], []]
    exact = [[], []]
    for tokens, counts, back in (
        (6, (3, 2), (0, 0)),
        (1, (1, 1), (0, 0)),
        (1, (1, 0), (0, 0)),
        (1, (1, 1), (2, 1)),
        (1, (1, 1), (0, 0)),
        (6, (6, 1), (0, 0)),
        (1, (1, 1), (0, 0)),
    ):
        q = rng.normal(size=(batch, heads, group, tokens, DIM)).astype(np.float32)
        kv = rng.normal(size=(2, batch, heads, tokens, DIM)).astype(np.float32)
        rounded = np.stack(
            FewInt4.encode_entries(
                *(jnp.asarray(each.reshape(batch, -1, DIM)) for each in kv)
            ).decode_entries()
        ).reshape(kv.shape)
        k, v = map(jnp.asarray, kv)
        out, pool = advance(
            pool,
            length,
            jnp.asarray([len(each) for each in entries], jnp.int32),
            TokenProjections(q=jnp.asarray(q), k=k, v=v, stored=k),
            jnp.asarray(counts, jnp.int32),
            jnp.asarray(sinks, jnp.float32),
        )
        for row, count in enumerate(counts):
            # A single token's entry takes the place of the oldest before it is attended to.
            least = len(entries[row]) - SIZE + (tokens == 1)
            older = [own[at not in exact[row] or at < least] for at, own in enumerate(entries[row])]
            new = [(kv[:, row, :, at], rounded[:, row, :, at]) for at in range(count)]
            for at, head, each in np.ndindex(count, heads, group):
                read = np.stack([*older, *(own for own, _ in new[: at + 1])])[:, :, head]
                query = q[row, head, each, at].astype(np.float64)
                wanted = attended(query, read[:, 0], read[:, 1], sinks[head, each])
                np.testing.assert_allclose(out[row, head, each, at], wanted, atol=2e-5)
            before = len(entries[row])
            left = before + count - back[row]
            appended = [*exact[row], *range(before, before + count)][-SIZE:]
            exact[row] = [index for index in appended if index < left]
            entries[row] = [*entries[row], *new][:left]
        length = length + jnp.asarray(np.subtract(counts, back), jnp.int32)[:, None]


def test_sequences_of_a_batch_are_as_alone():
    """Tokens, one by one, and a question of several; recompression drops the last entries of its sequences alone."""
    model, ids = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(2, (61, 40))
    policy = jaxkv.KNorm(budget=24, every=6, store=FewInt4)
    session = jaxkv.Session(model, policy)

    def ran(prompts, questions):
        cache, told = session.sample(session.prefill(prompts, new=9), 9)
        cache, more = session.sample(session.extend(cache, questions, new=9), 9)
        return np.concatenate([told, more], axis=1).tolist(), cache

    questions = tiny.prompts(3, (3, 7))
    together, cache = ran(ids, questions)
    alone = [ran(ids[at : at + 1], questions[at : at + 1]) for at in range(2)]
    assert together == [tokens for told, _ in alone for tokens in told]
    for layer, pool in enumerate(cache.pools):
        held = [each.pools[layer].residual.positions for _, each in alone]
        np.testing.assert_array_equal(pool.residual.positions, np.concatenate(held))
        assert ((pool.residual.positions >= 0).sum(axis=1) > 0).all()
    # Recompression is due for a sequence with six more entries than the budget.
    asked = session.extend(session.prefill(ids, new=9), tiny.prompts(4, (7, 3)))
    again = session.recompress_sequences(asked, headroom=9)
    for pool, before in zip(again.pools, asked.pools, strict=True):
        assert sorted(before.residual.positions.tolist()[0]) == [64, 65, 66, 67]
        assert (pool.residual.positions[0] == -1).all()
        np.testing.assert_array_equal(pool.residual.positions[1], before.residual.positions[1])
    plain = jaxkv.Session(model, dataclasses.replace(policy, store="int4")).prefill(ids, new=9)
    extra = session.prefill(ids, new=9).nbytes - plain.nbytes
    assert extra == 2 * 2 * SIZE * (2 * 2 * 8 * 4 + 4)


def test_where_last_entries_cannot_stay_as_they_are_is_said():
    for make in (jaxkv.H2O, jaxkv.Quest, jaxkv.GlobalBudget):
        with pytest.raises(ValueError, match="store='ResidualInt4Store'.*use 'int4'"):
            make(budget=64, store="int4-residual")
