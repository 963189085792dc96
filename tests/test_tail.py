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
from jaxkv.bank import Traffic
from jaxkv.drawing import Drawing
from jaxkv.loading import LanguageModel
from jaxkv.models import loop as looping
from jaxkv.models.decoder import Decoder
from jaxkv.models.moving import program_for
from jaxkv.policies import GiniLayers

LENGTHS = [37, 21]
POLICIES = {
    "equal": jaxkv.SnapKV(budget=16, window=8),
    "ragged": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "shared": jaxkv.PyramidKV(budget=16, window=8, allocation=GiniLayers()),
    "rolling": jaxkv.StreamingLLM(budget=16, rolling_positions=True),
    "chosen": jaxkv.OmniKV(filter_layers=(0,), adjacent=0, budget=12),
    "chosen-by-window": jaxkv.OmniKV(filter_layers=(0,), adjacent=0, budget=16, window=8, selector="exponential"),
    "again": jaxkv.SnapKV(budget=16, window=8, every=64),
}


def loop(model, cache, logits, calls, *, tail, eos=-2):
    """Decodes in compiled loops of so many steps each; gives tokens, final logits and the cache."""
    drawing = Drawing(
        model.flat,
        jax.tree.map(jnp.copy, cache),
        jnp.asarray(logits),
        program=dataclasses.replace(program_for(model.flat, cache), tail=tail),
        sampling=jaxkv.Greedy(),
        eos=(eos,),
        key=jax.random.key(0),
        new=16,
        size=16,
        traffic=Traffic(),
    )
    drawn = [drawing.draw(steps) for steps in calls]
    after = drawing.close()
    return np.concatenate(drawn, axis=1), np.asarray(after.logits), after


@pytest.mark.parametrize("name", POLICIES)
def test_both_loops_agree(name):
    """In float32, where either may run: same tokens, same logits, same rows; one sequence ends before the other."""
    model = tiny.tiny(tiny.MODELS["gqa3"])
    cache, logits, _ = tiny.run(model, tiny.prompts(0, LENGTHS), POLICIES[name], room=16)
    free, *_ = loop(model, cache, logits, [12], tail=False)
    # End the first sequence at a token that only it draws, so that the batch goes on without it.
    only_first = [token for token in free[0, 1:8].tolist() if token not in free[1].tolist()]
    eos = only_first[0] if only_first else -2
    tokens, last, direct = loop(model, cache, logits, [12], tail=False, eos=eos)
    tail_tokens, tail_last, gathered = loop(model, cache, logits, [5, 1, 6], tail=True, eos=eos)
    np.testing.assert_array_equal(tail_tokens, tokens)
    running = tokens[:, 11] >= 0
    np.testing.assert_allclose(tail_last[running], last[running], atol=1e-4)
    np.testing.assert_array_equal(np.asarray(gathered.seen), np.asarray(direct.seen))
    assert tiny.kept(gathered) == tiny.kept(direct)
    # Queries remembered for the next compression: of a sequence that has ended, none that came after.
    for ours, theirs in zip(jax.tree.leaves(gathered.state), jax.tree.leaves(direct.state), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5)
    for ours, theirs in zip(gathered.pools, direct.pools, strict=True):
        np.testing.assert_allclose(np.asarray(ours.k), np.asarray(theirs.k), atol=1e-5)
        np.testing.assert_allclose(np.asarray(ours.v), np.asarray(theirs.v), atol=1e-5)


def test_sixteen_bits_decode_close_to_thirty_two():
    """bfloat16 takes the tail on a CPU: its logits stay within its own rounding of float32's."""
    model = tiny.tiny(tiny.MODELS["mha"])
    ids = tiny.prompts(1, LENGTHS)
    short = [row[:-6] for row in ids]
    last = np.asarray([row[-6:] for row in ids], np.int32)
    half = _cast(model)
    results = []
    for each in (model, half):
        cache, _, _ = tiny.run(each, short, jaxkv.FullKV(), room=16)
        forced = _Forced(tuple(map(tuple, last.tolist())))
        program = program_for(each.flat, cache)
        assert program.tail == (each is half)
        draw = looping.Draw(logits=jnp.zeros((2, each.config.vocab)), done=jnp.zeros(2, bool), key=jax.random.key(0))
        running = looping.begin(cache, program=program, size=8)
        at = jnp.asarray([-2], jnp.int32)
        for step in range(6):
            running, draw, _, _ = looping.decode(
                each.flat, running, draw, at, 1, program=program, sampling=forced.at(step), size=4
            )
        results.append(np.asarray(draw.logits))
    scale = np.abs(results[0]).max()
    assert np.abs(results[0] - results[1]).max() < 0.06 * scale


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


@pytest.mark.parametrize("policy", (jaxkv.H2O(budget=16), jaxkv.D2O(budget=16)), ids=lambda each: type(each).__name__)
def test_rows_are_dropped_in_place(policy):
    check_in_place(policy)


def compiled(model, policy):
    """A pool of a short prompt's cache, and what XLA makes of the loop that draws on top of it."""
    cache, logits, _ = tiny.run(model, tiny.prompts(2, LENGTHS), policy, room=16)
    program = program_for(model.flat, cache)
    running = looping.begin(cache, program=program, size=16)
    draw = looping.Draw(logits=jnp.asarray(logits), done=jnp.zeros(2, bool), key=jax.random.key(0))
    given = looping.loop_arguments(model.flat, running, draw, jnp.asarray([-2], jnp.int32), 4, jaxkv.Greedy())
    leaves, structure = jax.tree.flatten(given)
    first, end = (len(jax.tree.leaves(given[:count])) for count in (2, 3))
    loop = partial(looping._loop.__wrapped__, program=program, size=16)
    run = lambda *each: loop(*jax.tree.unflatten(structure, each))  # noqa: E731
    # What it writes is donated, as it is by the library.
    return cache.pools[0], jax.jit(run, donate_argnums=tuple(range(first, end))).lower(*leaves).compile().as_text()


def _cast(model):
    decoder = Decoder(model.config, dtype=jnp.bfloat16)
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model.decoder, nnx.Param))
    nnx.update(decoder, state)
    return LanguageModel(decoder, text=None, name="half")


@dataclasses.dataclass(frozen=True)
class _Forced:
    """Draws given tokens, whatever the logits: both precisions then see the same text."""

    tokens: tuple[tuple[int, ...], ...]
    step: int = 0

    def at(self, step):
        return dataclasses.replace(self, step=step)

    def __call__(self, logits, keys):
        return jnp.asarray([row[self.step] for row in self.tokens], jnp.int32)
