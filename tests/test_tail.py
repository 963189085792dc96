"""The decode loop that leaves the pool alone while it runs gives what the one that writes at every step gives."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import jaxkv
from jaxkv.engine import loop as looping
from jaxkv.engine import session as sessions
from jaxkv.engine.spec import spec_for
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Decoder
from jaxkv.policies import GiniLayers

LENGTHS = [37, 21]
POLICIES = {
    "equal": jaxkv.SnapKV(budget=16, window=8),
    "ragged": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "shared": jaxkv.PyramidKV(budget=16, window=8, allocation=GiniLayers()),
    "rolling": jaxkv.StreamingLLM(budget=16, rolling_positions=True),
    "chosen": jaxkv.OmniKV(filter_layers=(0,), adjacent=0, budget=12),
    "chosen-by-window": jaxkv.OmniKV(
        filter_layers=(0,), adjacent=0, budget=16, window=8, selector="exponential"
    ),
    "again": jaxkv.SnapKV(budget=16, window=8, every=64),
}


def drawn(model, cache, calls, monkeypatch, *, tail, eos=-2):
    """Draws so many tokens at a time, in the loop of either kind; gives tokens, final logits and the cache."""
    monkeypatch.setattr(
        sessions, "spec_for", lambda *given: dataclasses.replace(spec_for(*given), tail=tail)
    )
    # A drawing gives up its cache.
    drawing = jaxkv.Session(model, cache.policy).drawing(
        jax.tree.map(jnp.copy, cache), new=16, eos=(eos,)
    )
    tokens = [drawing.draw(steps) for steps in calls]
    after = drawing.close()
    return np.concatenate(tokens, axis=1), np.asarray(after.logits), after


@pytest.mark.parametrize("name", POLICIES)
def test_both_loops_agree(name, monkeypatch):
    """In float32, where either may run: same tokens, same logits, same rows; one sequence ends before the other."""
    model = tiny.tiny(tiny.MODELS["gqa3"])
    cache, _, _ = tiny.run(model, tiny.prompts(0, LENGTHS), POLICIES[name], room=16)
    free, *_ = drawn(model, cache, [12], monkeypatch, tail=False)
    # End the first sequence at a token that only it draws, so that the batch goes on without it.
    only_first = [token for token in free[0, 1:8].tolist() if token not in free[1].tolist()]
    eos = only_first[0] if only_first else -2
    tokens, last, direct = drawn(model, cache, [12], monkeypatch, tail=False, eos=eos)
    tail_tokens, tail_last, gathered = drawn(
        model, cache, [5, 1, 6], monkeypatch, tail=True, eos=eos
    )
    np.testing.assert_array_equal(tail_tokens, tokens)
    running = tokens[:, 11] >= 0
    np.testing.assert_allclose(tail_last[running], last[running], atol=1e-4)
    np.testing.assert_array_equal(np.asarray(gathered.seen), np.asarray(direct.seen))
    assert tiny.kept(gathered) == tiny.kept(direct)
    # Queries remembered for the next compression: of a sequence that has ended, none that came after.
    for ours, theirs in zip(
        jax.tree.leaves(gathered.state), jax.tree.leaves(direct.state), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5)
    for ours, theirs in zip(gathered.pools, direct.pools, strict=True):
        np.testing.assert_allclose(np.asarray(ours.k), np.asarray(theirs.k), atol=1e-5)
        np.testing.assert_allclose(np.asarray(ours.v), np.asarray(theirs.v), atol=1e-5)


def test_sixteen_bits_decode_close_to_thirty_two():
    """bfloat16 takes the tail on a CPU: its logits stay within its own rounding of float32's."""
    model, results, texts = tiny.tiny(tiny.MODELS["mha"]), [], []
    half = _cast(model)
    for each in (model, half):
        cache, _, _ = tiny.run(each, tiny.prompts(1, LENGTHS), jaxkv.FullKV(), room=16)
        assert spec_for(each.flat, cache).tail == (each is half)
        after, text = jaxkv.Session(each).draw(cache, 6, sampling=_Noise(), key=0)
        results.append(np.asarray(after.logits))
        texts.append(text)
    np.testing.assert_array_equal(*texts)
    scale = np.abs(results[0]).max()
    assert 0 < np.abs(results[0] - results[1]).max() < 0.06 * scale


def test_sixteen_bits_leave_the_embedding_as_it_is():
    """No loop carries a float32 copy of the table, which XLA would make at every call."""
    model = _cast(tiny.tiny(tiny.MODELS["mha"]))
    _, text = compiled(model, jaxkv.FullKV())
    loops = [line for line in text.splitlines() if " while(" in line]
    table = f"[{model.config.vocab},{model.config.embed}]"
    assert any(f"bf16{table}" in line for line in loops)
    assert not any(f"f32{table}" in line for line in loops)


def check_in_place(policy):
    """A loop that reads a pool and writes rows of it copies no pool."""
    pool, text = compiled(tiny.tiny(tiny.MODELS["mha"]), policy)
    shape = f"f32[{','.join(map(str, pool.k.shape))}]"
    assert shape in text
    assert not re.findall(rf"= {re.escape(shape)}\S* copy\(", text)


@pytest.mark.parametrize(
    "policy", (jaxkv.H2O(budget=16), jaxkv.D2O(budget=16)), ids=lambda each: type(each).__name__
)
def test_rows_are_dropped_in_place(policy):
    check_in_place(policy)


def compiled(model, policy):
    """A pool of a short prompt's cache, and what XLA makes of the loop that draws on top of it."""
    cache, logits, _ = tiny.run(model, tiny.prompts(2, LENGTHS), policy, room=16)
    spec = spec_for(model.flat, cache)
    running = looping.begin(cache.arrays, spec=spec, size=16)
    none = jnp.asarray([-2], jnp.int32)
    draw = looping.draw_of(jnp.asarray(logits), jnp.zeros(2, bool), jax.random.key(0), none)
    given = looping.loop_arguments(
        model.flat, running, draw, 4, jaxkv.Sampling(temperature=0), 0, spec=spec
    )
    leaves, structure = jax.tree.flatten(given)
    first, end = (len(jax.tree.leaves(given[:count])) for count in (1, 2))
    loop = partial(looping._loop.__wrapped__, spec=spec, size=16)
    run = lambda *each: loop(*jax.tree.unflatten(structure, each))  # noqa: E731
    # What it writes is donated, as it is by the library.
    return cache.pools[0], jax.jit(run, donate_argnums=tuple(range(first, end))).lower(
        *leaves
    ).compile().as_text()


def _cast(model):
    decoder = Decoder(model.config, dtype=jnp.bfloat16)
    state = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model.decoder, nnx.Param)
    )
    nnx.update(decoder, state)
    return LanguageModel(decoder, text=None, name="half")


@dataclasses.dataclass(frozen=True)
class _Noise:
    """Tokens of the key alone, whatever the logits: both precisions then see the same text."""

    def __call__(self, logits, keys):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, logits.shape[-1], jnp.int32))(
            keys
        )
