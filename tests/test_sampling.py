"""How tokens are sampled: what is cut away, how often the rest comes, keys; and the bars shown meanwhile."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.engine.sampling import GREEDY, combine_samplers, convert_sampler_to_pytree

FOLDER = Path(__file__).parent / "golden" / "models" / "llama_gqa"
PROMPT = np.random.default_rng(0).integers(3, 96, 46).tolist()
DRAWING = {"stop_at_eos": False, "max_new_tokens": 12}
DRAWS = 20_000
DRAW = jax.jit(lambda sampling, logits, keys: sampling(logits, keys))


@pytest.fixture(scope="module")
def model():
    return jaxkv.load(FOLDER)


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def numpy_cut(sampling, logits):
    """Which tokens may be sampled, cut by cut, from the likeliest down; logits without ties."""
    allowed = np.zeros(logits.shape, bool)
    for row, values in enumerate(logits):
        order = list(np.argsort(-values))[: sampling.top_k or None]
        share, gathered = softmax(values[order] / sampling.temperature), 0.0
        for token, each in zip(order, share, strict=True):
            allowed[row, token] = gathered < sampling.top_p and each >= sampling.min_p * share[0]
            gathered += each
    return allowed


SAMPLINGS = [
    Sampling(top_k=3),
    Sampling(top_p=0.8, temperature=1.7),
    Sampling(min_p=0.2),
    # The nucleus is that of the tokens that are left.
    Sampling(top_k=5, top_p=0.8),
    Sampling(top_k=7, top_p=0.95, min_p=0.05, temperature=3.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_what_is_drawn_and_how_often(sampling):
    logits = np.random.default_rng(1).normal(scale=1.5, size=(4, 8)).astype(np.float32)
    allowed = numpy_cut(sampling, logits)
    # Probabilities are those at the temperature: the nucleus is the flattened distribution's.
    masked = np.asarray(combine_samplers([sampling]).mask_logits(jnp.asarray(logits)))
    np.testing.assert_array_equal(np.isfinite(masked), allowed)
    assert allowed.any(axis=1).all()
    share = np.where(allowed, softmax(logits / sampling.temperature), 0)
    share /= share.sum(axis=1, keepdims=True)
    keys = jax.random.split(jax.random.key(2), DRAWS)
    for row in range(len(logits)):
        drawn = np.asarray(sampling(jnp.broadcast_to(jnp.asarray(logits[row]), (DRAWS, 8)), keys))
        assert drawn.dtype == np.int32
        counts = np.bincount(drawn, minlength=8)
        assert not counts[~allowed[row]].any()
        # Five standard deviations of a binomial.
        sigma = np.sqrt(share[row] * (1 - share[row]) / DRAWS)
        assert (np.abs(counts / DRAWS - share[row]) <= 5 * sigma + 1e-9).all()


def test_greedy_takes_the_lowest_of_equals():
    logits = jnp.asarray([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -9.0, -9.0, -1.0]])
    assert GREEDY(logits, jax.random.split(jax.random.key(0), 3)).tolist() == [1, 0, 3]


def test_ties_at_the_cut_stay_together():
    logits = jnp.asarray([[2.0, 1.0, 2.0, 1.0, 1.0]])
    for sampling in (
        Sampling(top_k=1),
        Sampling(top_p=0.1),
        Sampling(top_p=1e-300),
        Sampling(min_p=0.9),
    ):
        kept = np.isfinite(np.asarray(combine_samplers([sampling]).mask_logits(logits)))[0]
        assert kept.tolist() == [True, False, True, False, False]


def test_numbers_of_any_kind(as_users_call):
    given = Sampling(top_k=np.int64(3), temperature=np.float32(0.5), top_p=np.float64(0.5))
    assert given == Sampling(top_k=3, temperature=0.5, top_p=0.5)
    assert type(given.top_k) is int and type(given.top_p) is float
    assert Sampling(top_k=-1) == Sampling(top_k=0) == Sampling()
    logits = jnp.asarray([[0.0, 3.0, 1.0, 2.9]])
    # More than there are tokens.
    for k in (4, 99, 2**31 - 1):
        assert np.isfinite(
            np.asarray(combine_samplers([Sampling(top_k=k)]).mask_logits(logits))
        ).all()


def sampled_by(sampling, logits, keys):
    """Token ids by the sampler itself, compiled with its numbers as arguments, and as one of a batch's samplers."""
    yield sampling(logits, keys)
    yield DRAW(convert_sampler_to_pytree(sampling), logits, keys)
    yield DRAW(combine_samplers([sampling, *[GREEDY] * (len(keys) - 1)]), logits, keys)[:1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1e300])
def test_cuts_hold_at_any_temperature(temperature):
    logits = jnp.asarray(np.random.default_rng(3).normal(scale=4, size=(50, 64)), jnp.float32)
    logits = logits.at[:, 5].set(-jnp.inf)
    keys = jax.random.split(jax.random.key(0), 50)
    best = GREEDY(logits, keys)
    greedy = [
        Sampling(top_k=1, temperature=temperature),
        Sampling(min_p=1.0, temperature=temperature),
    ]
    if temperature == 1e-300:
        greedy += [Sampling(temperature=temperature), Sampling(top_p=0.9, temperature=temperature)]
    for sampling in greedy:
        for tokens in sampled_by(sampling, logits, keys):
            np.testing.assert_array_equal(tokens, best[: len(tokens)])
    for tokens in sampled_by(Sampling(top_k=3, temperature=temperature), logits, keys):
        ranks = (logits[: len(tokens)] > logits[jnp.arange(len(tokens)), tokens][:, None]).sum(
            axis=1
        )
        assert int(ranks.max()) < 3
    if temperature == 1e300:
        # As good as uniform: a nucleus of half of the probability is half of the 63 tokens that there are.
        for tokens in sampled_by(Sampling(top_p=0.5, temperature=temperature), logits, keys):
            ranks = (logits[: len(tokens)] > logits[jnp.arange(len(tokens)), tokens][:, None]).sum(
                axis=1
            )
            assert int(ranks.max()) < 32 and len(set(ranks.tolist())) > min(8, len(tokens) - 1)


def rare_logits():
    """One likely token and 2**18 rare ones, whose logits are lower by 14 to 20: tokens of each gap come as often."""
    gaps = np.arange(14, 21)
    counts = (2**18 * np.exp(gaps) / np.exp(gaps).sum()).astype(int)
    logits = np.concatenate(
        [[0.0], *(np.full(count, -gap) for gap, count in zip(gaps, counts, strict=True))]
    )
    return np.random.default_rng(0).permutation(logits.astype(np.float32))


def test_rare_tokens_come_as_often_as_they_should():
    logits, trials = rare_logits(), 30_000
    # Logits without a batch axis: what is computed of them alone is then computed once for a thousand keys.
    each = jax.vmap(lambda key, logits: Sampling()(logits[None], key[None])[0], in_axes=(0, None))
    sample = jax.jit(lambda logits, keys: jax.lax.map(lambda some: each(some, logits), keys))
    keys = jax.random.split(jax.random.key(0), (trials // 1000, 1000))
    tokens = np.asarray(sample(jnp.asarray(logits), keys)).ravel()
    found = np.bincount(-logits[tokens].astype(int), minlength=21)[14:]
    likely = softmax(logits)
    expected = np.asarray([likely[logits == -gap].sum() * trials for gap in range(14, 21)])
    assert expected.min() > 9
    # 24.3 is exceeded once in a thousand times with seven degrees of freedom.
    assert (((found - expected) ** 2) / expected).sum() < 24.3


def test_temperatures_are_one_program(model):
    def programs(sampling, seed):
        options = {"sampling": sampling, "key": jax.random.key(seed)}
        return jaxkv.generate(model, PROMPT, **options, **DRAWING).stats.compiled_programs

    assert programs(Sampling(), 0)
    for each in (1, 4, 10):
        heat, share = 0.1 * each, 0.09 * each
        others = (
            Sampling(temperature=heat),
            Sampling(top_k=each, temperature=heat),
            Sampling(top_p=share, temperature=heat),
            Sampling(min_p=share, top_k=each),
        )
        assert [programs(sampling, each) for sampling in others] == [0] * 4


def test_the_numbers_of_a_sampling_are_generates_own_arguments(model):
    numbers = {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    mine = jaxkv.generate(model, PROMPT, **numbers, seed=3, **DRAWING).tokens
    sampling = Sampling(**numbers)
    theirs = jaxkv.generate(model, PROMPT, sampling=sampling, key=jax.random.key(3), **DRAWING)
    np.testing.assert_array_equal(mine, theirs.tokens)
    greedy = jaxkv.generate(model, PROMPT, **DRAWING).tokens
    cold = jaxkv.generate(model, PROMPT, temperature=0, top_p=0.5, **DRAWING).tokens
    np.testing.assert_array_equal(cold, greedy)


def test_a_sampler_of_ones_own(model):
    def second(logits, keys):
        return jnp.argsort(logits, axis=-1)[:, -2].astype(jnp.int32)

    def unlikeliest(logits, keys):
        return jnp.argmin(logits, axis=-1).astype(jnp.int32)

    drawn = [
        jaxkv.generate(
            model, PROMPT, sampling=sampling, key=jax.random.key(0), **DRAWING
        ).tokens.tolist()
        for sampling in (second, unlikeliest, second)
    ]
    assert drawn[0] == drawn[2] != drawn[1]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Among(Sampling):
        """One that needs its number as Python's: a shape."""

        def __call__(self, logits, keys):
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            masked = jnp.where(logits >= least, logits, -jnp.inf)
            return Sampling(temperature=self.temperature)(masked, keys)

    options = {"key": jax.random.key(0), **DRAWING}
    for k in (1, 4):
        given = {"top_k": k, "temperature": 3.0}
        own = jaxkv.generate(model, PROMPT, sampling=Among(**given), **options)
        ours = jaxkv.generate(model, PROMPT, **given, **options)
        np.testing.assert_array_equal(own.tokens, ours.tokens)


def test_keys(model):
    policy = jaxkv.RandomKV(budget=16)
    caches = [
        jaxkv.prefill(model, PROMPT, policy=policy, key=jax.random.key(seed)) for seed in (3, 3, 4)
    ]
    positions = [np.stack([pool.pos for pool in cache.pools]) for cache in caches]
    np.testing.assert_array_equal(positions[0], positions[1])
    assert (positions[0] != positions[2]).any()
    hot = Sampling(temperature=5.0)
    drawn = [
        jaxkv.generate(
            model, PROMPT, sampling=hot, key=jax.random.key(seed), **DRAWING
        ).tokens.tolist()
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    # The k = 1 likeliest is the greedy one, whatever the key.
    greedy = jaxkv.generate(model, PROMPT, **DRAWING).tokens
    only = jaxkv.generate(
        model, PROMPT, sampling=Sampling(top_k=1), key=jax.random.key(7), **DRAWING
    ).tokens
    np.testing.assert_array_equal(greedy, only)
    # Sequences of a batch sample on their own.
    rows = jaxkv.generate(model, [PROMPT] * 3, sampling=hot, key=jax.random.key(0), **DRAWING)
    assert len({tuple(each.tokens.tolist()) for each in rows}) == 3


def test_progress_bars(model, capsys):
    jaxkv.generate(model, PROMPT, progress=True, **DRAWING)
    shown = capsys.readouterr()
    assert "prefill" in shown.err and "decode" in shown.err and shown.out == ""
    # Neither stream is a terminal here.
    jaxkv.generate(model, PROMPT, progress=None, **DRAWING)
    jaxkv.prefill(model, PROMPT)
    assert tuple(capsys.readouterr()) == ("", "")
