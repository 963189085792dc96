"""Claims of the papers that arithmetic or a property decides, through the library; rows as in docs/claims.md.

Oracles are a few lines each and share nothing with the library. What other tests decide is not tested again here:
docs/claims.md names them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.engine.plan import plan_prefill
from jaxkv.planning import speed
from jaxkv.planning.catalog import model_named
from jaxkv.policies import (
    AdaptiveHeads,
    KVPressLayers,
    LayerBudgetInputs,
    LinearLayers,
    Merge,
    OfficialLayers,
    OfficialVarianceLayers,
    VarianceLayers,
)
from jaxkv.policies.merger import EntryPerSegment

LLAMA_8B, LLAMA_7B = (model_named(name).config for name in ("llama-3-8b", "llama-2-7b"))
# Fine-tuned for long texts, the same shape has more positions; Llama 3.1's has 131,072.
LONG_8B = dataclasses.replace(LLAMA_8B, max_positions=1 << 21)
MIB, GIB, GB = 1 << 20, 1 << 30, 1e9
# Of Llama 3 8B in 16 bits: layers, kv heads, head dim.
TOKEN = 2 * 32 * 8 * 128 * 2


def full(config, *lengths, times=1):
    """Bytes of an uncompressed cache in 16 bits."""
    return plan_prefill(config, jaxkv.FullKV(), lengths, dtype="float16", times=times).full_bytes


def pyramid(capacity, *lengths, config=LLAMA_8B, layers=LinearLayers(), window=8):  # noqa: B008  a frozen value
    """Rows per kv head of each layer and prompt."""
    policy = jaxkv.PyramidKV(budget=capacity, layers=layers, window=window)
    return plan_prefill(config, policy, lengths, dtype="float16").rows


def spread(layers, budget, length, stats, always_kept=5):
    """Rows of each layer, of layer budgets by variance."""
    one = np.asarray
    weights = np.asarray(stats, np.float64)[:, None]
    of = {"layers": len(stats), "window": 1, "weights": weights}
    return layers.compute_layer_entries(
        LayerBudgetInputs(one([budget]), one([length]), one([always_kept]), **of)
    )[:, 0]


# --- PyramidKV -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "whole"), [(8, 1024), (32, 4096)], ids=["kv heads", "query heads"]
)
@pytest.mark.parametrize("capacity", [512, 2048])
def test_p1_shares_of_table_2_are_right_and_its_megabytes_are_not(capacity, stored, whole):
    config = dataclasses.replace(LLAMA_8B, kv_heads=stored)
    plan = plan_prefill(config, jaxkv.PyramidKV(budget=capacity), [8192], dtype="float16")
    each = stored * 2 * 128 * 2
    assert plan.full_bytes == 32 * 8192 * each == whole * MIB
    kept = int(plan.rows.sum()) * each
    assert kept == 32 * capacity * each and kept / plan.full_bytes == capacity / 8192
    # Positions and tables besides.
    assert kept < plan.cache_bytes < 1.01 * kept
    # Neither layout makes 6848 MB of it, whatever an MB is; the printed figures keep their ratios.
    assert all(abs(6848 * unit / plan.full_bytes - 1) > 0.3 for unit in (MIB, 1e6))
    assert {512: 428, 2048: 1712}[capacity] / 6848 == capacity / 8192


def test_p2_llama_2_of_100k_tokens_is_above_50_gb_and_of_2k_is_no_less_than_one():
    assert (
        full(LLAMA_7B, 100_000)
        == 2 * 32 * 32 * 128 * 2 * 100_000
        == pytest.approx(52.4 * GB, rel=1e-3)
    )
    assert full(LLAMA_7B, 2048) == GIB > GB
    assert GB < full(LLAMA_7B, 2000) < GIB


def released(capacity, layers, window=8, beta=20):
    """The released pyramid for prompts far above the budget: the step between layers is floored."""
    base = capacity - window
    least = base // beta
    step = (2 * base - 2 * least) // (layers - 1)
    return [2 * base - least - layer * step + window for layer in range(layers)]


@pytest.mark.parametrize(
    ("layers", "capacity", "average"),
    [
        (32, 64, 71.5),
        (32, 128, 133.5),
        (32, 2048, 2048.5),
        (80, 64, 78.5),
        (80, 128, 163.0),
    ],
)
def test_p3_the_sum_is_exact_and_the_released_code_overshoots_it(layers, capacity, average):
    config = dataclasses.replace(LLAMA_8B, layers=layers)
    ours = pyramid(capacity, 8192, 5000, config=config)
    assert (ours.sum(axis=0) == layers * capacity).all()
    # The ends of equation 1, in whole rows; the window is besides.
    base = capacity - 8
    assert (
        abs(ours[-1, 0] - 8 - base / 20) <= 1 and abs(ours[0, 0] - 8 - (2 * base - base / 20)) <= 1
    )
    theirs = pyramid(capacity, 8192, config=config, layers=OfficialLayers())[:, 0].tolist()
    assert theirs == released(capacity, layers) and sum(theirs) / layers == average
    # kvpress: within half a row a layer of the budget; uniform where the top layer would be below the window.
    kvpress = pyramid(capacity, 8192, config=config, layers=KVPressLayers())[:, 0]
    assert abs(kvpress.mean() - capacity) <= 0.5
    assert (len(set(kvpress.tolist())) == 1) == (capacity / 20 < 8)


@given(
    capacity=st.integers(24, 2048),
    beta=st.floats(1, 40),
    layers=st.integers(2, 80),
    lengths=st.lists(st.integers(2048, 100_000), min_size=2, max_size=3),
)
def test_p4_layers_get_fewer_rows_upwards_between_the_ends_unless_the_prompt_is_short(
    capacity, beta, layers, lengths
):
    config = dataclasses.replace(LLAMA_8B, layers=layers)
    rows = pyramid(capacity, *lengths, config=config, layers=LinearLayers(beta=beta)) - 8
    assert (np.diff(rows, axis=0) <= 0).all() and (
        rows.sum(axis=0) == layers * (capacity - 8)
    ).all()
    least = (capacity - 8) / beta
    most = 2 * (capacity - 8) - least
    free = most <= np.asarray(lengths) - 8
    assert (rows[-1, free] >= np.floor(least)).all() and (rows[0, free] <= np.ceil(most)).all()
    assert (rows[0, ~free] == np.asarray(lengths)[~free] - 8).all()


# LongBench: average words of the 16 datasets, in the order of the papers' tables.
LENGTHS = (
    18409,
    3619,
    4559,
    9151,
    4887,
    11214,
    8734,
    10614,
    2113,
    5177,
    8209,
    6258,
    11141,
    9289,
    1235,
    4206,
)


@pytest.mark.parametrize(
    ("capacity", "printed"),
    [(64, (0.003477, 0.051822)), (128, (0.006953, 0.103644)), (2048, (0.111250, 1.658300))],
)
def test_p5_shares_of_table_3_are_what_stays_up_to_a_whole_prompt(capacity, printed):
    kept = pyramid(capacity, *LENGTHS).mean(axis=0)
    assert (kept == np.minimum(capacity, LENGTHS)).all()
    shares = kept / LENGTHS
    assert shares[0] == pytest.approx(printed[0], abs=5e-7)
    # LCC at 2048 has fewer words than the budget: 1.66 is no compression, and nothing is kept that is not there.
    assert shares[-2] == pytest.approx(min(printed[1], 1), abs=5e-7)


def test_p6_seven_tenths_of_a_percent_is_one_dataset_and_twelve_percent_none():
    kept = {capacity: pyramid(capacity, *LENGTHS).mean(axis=0) for capacity in (128, 1024, 2048)}
    assert kept[128][0] / LENGTHS[0] == pytest.approx(0.007, abs=5e-5)
    of_2048 = kept[2048] / LENGTHS
    # The longest dataset, their mean, all tokens together, and the context that the models were made for.
    means = [of_2048[0], of_2048.mean(), kept[2048].sum() / sum(LENGTHS), 2048 / 8192, 2048 / 32768]
    assert np.round(means, 3).tolist() == [0.111, 0.388, 0.269, 0.25, 0.062]
    assert np.round(kept[1024][0] / 8192, 3) == 0.125


# --- Ada-KV ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [96, 224])
def test_a6_budgets_of_heads_sum_to_the_layers_where_published_rounding_loses_some(base):
    rng, heads, alpha = np.random.default_rng(base), 8, 0.2
    won = np.stack(
        [rng.multinomial(heads * base, rng.dirichlet(np.ones(heads))) for _ in range(200)]
    )
    given_to = AdaptiveHeads(alpha=alpha).compute_head_entries
    ours = np.asarray(given_to(jnp.asarray(won, jnp.int32), jnp.full(len(won), base, jnp.int32)))
    assert (ours.sum(axis=1) == heads * base).all()
    assert (np.abs(ours - ((1 - alpha) * won + alpha * base)) <= 1 + 1e-6).all()
    published = np.rint(won * (1 - alpha) + int(base * alpha)).sum(axis=1)
    # The floor is cut to an integer, head by head, before anything is rounded: 6.4 and 1.6 rows a layer.
    lost = heads * base - published
    assert lost.mean() == pytest.approx(heads * (base * alpha - int(base * alpha)), abs=0.3)
    assert (np.abs(lost - lost.mean()) <= heads / 2).all() and lost.any()


def test_a6_windows_are_taken_out_of_the_budget():
    policy, lengths = jaxkv.AdaKV(budget=256), (4096, 300)
    plan = plan_prefill(LLAMA_8B, policy, lengths)
    assert plan.numbers.always_kept.tolist() == [32, 32] and (plan.rows == 256).all()
    cache, *_ = tiny.run(
        tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(3, (60, 41)), jaxkv.AdaKV(budget=36)
    )
    assert (cache.kept.sum(axis=2) == 36 * 2).all() and (cache.kept >= 32).all()
    assert len(set(cache.kept.reshape(-1).tolist())) > 1


def test_a9_rows_of_kv_heads_are_a_quarter_of_rows_of_query_heads():
    config = model_named("llama-3.1-8b").config
    repeated = dataclasses.replace(config, kv_heads=config.heads)
    for policy in (jaxkv.FullKV(), jaxkv.AdaKV(budget=1024)):
        small, large = (
            plan_prefill(each, policy, [32768], dtype="float16") for each in (config, repeated)
        )
        assert large.full_bytes == 4 * small.full_bytes
        # Lengths besides, which are no rows.
        assert large.cache_bytes == pytest.approx(4 * small.cache_bytes, rel=1e-3)


def test_a10_two_million_tokens_of_an_8b_model_are_256_gib():
    assert full(LONG_8B, 1 << 21) == (1 << 21) * TOKEN == 256 * GIB


# --- D2O -------------------------------------------------------------------------------------------------------------


def test_d1_released_code_keeps_more_than_a_fifth():
    stats = np.random.default_rng(1).random(32)
    for layer_weights in (np.full(32, 0.5), stats):
        assert spread(VarianceLayers(), 819, 4096, layer_weights).sum() == 32 * 819
        released = spread(OfficialVarianceLayers(), 819, 4096, layer_weights).mean() / 4096
        assert released == pytest.approx((3 + 29 * 0.2) / 32, abs=0.003)


def test_d2_raw_variances_leave_nearly_all_layers_the_least():
    """Column sums average 1, a sink's is of the order of the prompt: exp(-F) then has one winner after the other."""
    rows = spread(VarianceLayers(statistic="raw"), 200, 1000, np.linspace(5, 1000, 32))
    assert (np.diff(rows) <= 0).all() and (rows[:6] == 1000).all() and (rows[7:] == 10).all()
    # Scaled within each layer, the claims are within a factor of e.
    rows = spread(VarianceLayers(), 200, 1000, np.linspace(0, 1, 32))
    assert (np.diff(rows) <= 0).all() and rows[0] <= np.e * rows[-1] + 1 and rows.sum() == 32 * 200


def test_d3_the_cache_stays_as_large_while_tokens_are_drawn():
    model, lengths, budget = tiny.tiny(tiny.TWO_LAYERS), (47, 31), 20
    session = jaxkv.Session(model, jaxkv.D2O(budget=budget))
    cache = session.prefill(tiny.prompts(4, lengths), new=6)
    rows, nbytes = cache.kept, cache.nbytes
    assert (rows.sum(axis=(0, 2)) == budget * rows.shape[0] * rows.shape[2]).all()
    for step in range(1, 7):
        cache, _ = session.sample(cache, 1, new=6, donate=True)
        np.testing.assert_array_equal(cache.kept, rows)
        assert cache.nbytes == nbytes and cache.seen.tolist() == [n + step for n in lengths]
    # T sinks, and the newest of the M recent ones; N is what is left of each layer's rows.
    for heads in (sequence for layer in tiny.kept(cache) for sequence in enumerate(layer)):
        newest = lengths[heads[0]] + 5
        assert all({0, 1, 2, 3, newest} <= set(head) for head in heads[1])


@jax.jit
def all_merged(*layer):
    """Values after every dropped row has joined a kept one."""
    return Merge(threshold=-np.inf).merge_evicted_entries(*layer, jax.random.key(0)).v


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_d4_weights_sum_to_one_where_the_printed_ones_do_not(seed, dropped):
    """Values of one-hot rows read the weights off the merged row. One kept row is all that the dropped ones have."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((2, 1, 6, 6)).astype(np.float32)
    v = np.broadcast_to(np.eye(6, dtype=np.float32), k.shape)
    inside = np.arange(6) <= np.asarray(dropped)[:, None, None]
    kept = inside & (np.arange(6) == 0)
    tau, mass = np.full((2, 1, 1), -np.inf, np.float32), np.zeros((2, 1, 6), np.float32)
    values = np.asarray(
        all_merged(*(jnp.asarray(each) for each in (k, v, kept, inside, mass, tau)))
    )
    for row, number in enumerate(dropped):
        weights = values[row, 0, 0]
        assert weights.sum() == pytest.approx(1, abs=1e-5) and weights[0] >= weights.max() - 1e-6
        unit = (k[row, 0] / np.linalg.norm(k[row, 0], axis=-1, keepdims=True)).astype(np.float64)
        layer_weights = np.exp(unit[1 : number + 1] @ unit[0])
        total = np.e + layer_weights.sum()
        expected = np.concatenate([[np.e], layer_weights, np.zeros(5 - number)]) / total
        np.testing.assert_allclose(weights, expected, atol=1e-5)
        # Equation 12 as printed has the sum in every dropped row's numerator.
        printed = (np.e + number * layer_weights.sum()) / total
        assert printed > 1.1 if number > 1 else printed == pytest.approx(1)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_d5_a_row_joins_if_it_is_no_less_like_than_those_before(seed, beta):
    rng, merge = np.random.default_rng(seed), Merge(beta=beta)
    # A prompt: five rows of each of three heads are dropped; their cosines are those of the nearest kept ones.
    cosines, dropped = rng.uniform(-1, 1, (2, 3, 8)).astype(np.float32), np.arange(8) < 5
    dropped = jnp.broadcast_to(jnp.asarray(dropped), cosines.shape)
    tau = merge.update_thresholds(jnp.full((2, 3), -jnp.inf), jnp.asarray(cosines), dropped)
    expected = cosines[..., :5].astype(np.float64).mean(axis=-1)
    np.testing.assert_allclose(tau, expected, atol=1e-6)
    joins = np.asarray(merge.mask_entries_to_merge(tau, jnp.asarray(cosines), dropped))
    clear = np.abs(cosines - expected[..., None]) > 1e-5
    assert (joins == ((cosines >= expected[..., None]) & np.asarray(dropped)))[clear].all()
    # Then one at a time: moving the threshold first changes no decision.
    row, goes = EntryPerSegment(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3, 4))), jnp.ones((2, 3), bool)
    for _ in range(4):
        cosine = rng.uniform(-1, 1, (2, 3)).astype(np.float32)
        joined = merge.merge_entry_while_decoding(
            0, jnp.asarray(cosine), row, row, goes, jnp.asarray(tau)[..., None]
        )
        clear = (1 - beta) * np.abs(cosine - expected) > 1e-5
        assert (np.asarray(joined.joins) == (cosine >= expected))[clear].all()
        expected, tau = beta * cosine + (1 - beta) * expected, np.asarray(joined.tau)[..., 0]
        np.testing.assert_allclose(tau, expected, atol=1e-5)


def test_d6_30_billion_parameters_1024_tokens_128_sequences():
    heads, shape = (
        56,
        {"vocab": 50272, "layers": 48, "embed": 7168, "hidden": 28672, "max_positions": 2048},
    )
    config = jaxkv.ModelConfig(heads=heads, kv_heads=heads, head_dim=128, **shape)
    assert full(config, 1024, times=128) == pytest.approx(180.4 * GB, rel=1e-3)


@pytest.mark.parametrize(
    ("prompt", "batch", "fit"), [(256, 8, 315), (512, 4, 174), (1024, 2, 94), (2048, 1, 47)]
)
def test_d7_four_times_the_batch_weighs_less_and_nothing_bounds_the_full_cache_at_such_batches(
    prompt, batch, fit
):
    options = {"gpus": "a100-80gb", "context": prompt, "new": 4 * prompt}
    whole = jaxkv.plan(LONG_8B, batch=batch, **options)
    d2o, h2o = (
        jaxkv.plan(LONG_8B, batch=4 * batch, policy=p(budget=prompt), **options)
        for p in (jaxkv.D2O, jaxkv.H2O)
    )
    rows = lambda sequences, tokens: sequences * tokens * TOKEN  # noqa: E731
    assert whole.cache == pytest.approx(rows(batch, 5 * prompt), rel=0.02)
    assert d2o.cache == pytest.approx(rows(4 * batch, prompt), rel=0.02)
    # Four times the sequences in four fifths of the bytes; merging costs none.
    assert d2o.cache / whole.cache == pytest.approx(4 / 5, rel=0.02) and d2o.cache == pytest.approx(
        h2o.cache, rel=1e-3
    )
    # The paper's largest batch of the full model is no limit of memory: 1.3 GB beside 16 GB of weights, of 80.
    assert whole.cache < 1.4 * GB and whole.largest_batch == fit > 25 * batch


def test_d13_what_is_proved_of_water_filling_does_not_hold_of_the_softmax():
    """A.9's information H (1 - exp(-k S)), entropies that fall with the variance as it says, and the split of eq. 5."""
    stats = np.linspace(0, 1, 8)
    quality = lambda heights, sizes: (heights * -np.expm1(-0.01 * np.asarray(sizes))).sum()  # noqa: E731
    softmax, even = spread(VarianceLayers(), 200, 1000, stats), np.full(8, 200)
    assert softmax.sum() == even.sum()
    nearly_alike, far_apart = 1 + 0.05 * (1 - stats), 1 + 10 * (1 - stats)
    assert quality(nearly_alike, softmax) < quality(nearly_alike, even)
    assert quality(far_apart, softmax) > quality(far_apart, even)


# --- OmniKV ----------------------------------------------------------------------------------------------------------

FILTERS = (2, 8, 18)


def read_by(policy, length, config=LONG_8B):
    """Tokens that a layer reads which reads what was chosen."""
    return int(
        policy.build_policy_parts().read.count_attended_tokens(np.asarray([length]), config.layers)[
            0
        ]
    )


def test_o1_three_quarters_of_the_cache_wait_in_host_memory():
    policy = jaxkv.OmniKV(filter_layers=FILTERS, budget=2048, offload=True)
    plan = plan_prefill(LONG_8B, policy, [131072], dtype="float16")
    assert plan.host_bytes / plan.full_bytes == 24 / 32
    assert plan.cache_bytes / plan.full_bytes == pytest.approx(0.25, rel=0.01)


def test_o3_thirty_percent_of_128k_are_8533_tokens_and_6400_are_less_than_29_percent():
    assert read_by(jaxkv.OmniKV(filter_layers=FILTERS, mem=0.3), 128_000) == 128_000 // 15 == 8533
    assert read_by(jaxkv.OmniKV(filter_layers=FILTERS, budget=0.067), 128_000) == 8576
    assert read_by(jaxkv.OmniKV(filter_layers=FILTERS, mem=0.2875), 128_000) == 6400


def test_o4_eight_sequences_of_128k():
    assert (
        full(LONG_8B, 128_000, times=8)
        == 8 * 128_000 * TOKEN
        == pytest.approx(134.2 * GB, rel=1e-3)
    )


def test_o5_450k_tokens_fit_on_80_gb_and_so_does_three_times_128k_of_the_full_cache():
    omni = jaxkv.OmniKV(filter_layers=FILTERS, budget=2048, offload=True)
    plan = jaxkv.plan(LONG_8B, gpus="a100-80gb", context=450_000, new=50, policy=omni)
    assert plan.fits and plan.weights == pytest.approx(16.06 * GB, rel=1e-3)
    # A quarter of the rows stays; the others' chosen ones come and go.
    assert plan.cache == pytest.approx(450_000 * TOKEN / 4, rel=0.03)
    whole = jaxkv.plan(LONG_8B, gpus="a100-80gb", context=450_000, new=50)
    assert not whole.fits and whole.sizes.full == 450_000 * TOKEN == pytest.approx(
        59.0 * GB, rel=1e-3
    )
    assert (
        jaxkv.plan(LONG_8B, gpus="a100-80gb", context=128_000, new=50).largest_context > 3 * 128_000
    )
    seventy = full(model_named("llama-3.1-70b").config, 150_000)
    assert seventy == 2 * 80 * 8 * 128 * 2 * 150_000 == pytest.approx(49.2 * GB, rel=1e-3)


def test_o6_bytes_alone_allow_less_than_the_speed_that_was_measured():
    tokens, chosen = 128_000, 2048
    # What a step reads: all weights but the embedding's table, and rows.
    weights = 16.06 * GB - 128_256 * 4096 * 2
    rows = TOKEN * (tokens * 8 + chosen * 24) / 32
    bound = (weights + TOKEN * tokens) / (weights + rows)
    assert bound == pytest.approx(1.64, abs=0.005) and TOKEN * tokens / rows == pytest.approx(
        3.8, abs=0.05
    )
    omni = jaxkv.OmniKV(filter_layers=FILTERS, budget=chosen)
    speeds = [
        jaxkv.plan(LONG_8B, gpus="a100-80gb", context=tokens, new=2, policy=p).speed
        for p in (None, omni)
    ]
    # Weights are estimated at a lower rate than rows.
    full_step, step = (
        each.weights * speed.WEIGHTS[None] / speed.ROWS + each.rows for each in speeds
    )
    # Filters read their keys once more for their scores.
    again = 3 * tokens * TOKEN / 64
    assert full_step / step == pytest.approx(
        (weights + TOKEN * tokens) / (weights + rows + again), rel=5e-3
    )
    assert speeds[0].step / speeds[1].step < full_step / step < bound < 1.68


def test_o8_chosen_rows_are_a_fiftieth_of_what_whole_layers_are():
    prompt, dim = 128_000, 2 * 8 * 128 * 2
    omni = (
        jaxkv.OmniKV(filter_layers=FILTERS, budget=2048, offload=True)
        .build_policy_parts()
        .build_read_config((None,) * 32, prompt)
    )
    brutal = (
        jaxkv.BrutalOffload(resident_layers=12)
        .build_policy_parts()
        .build_read_config((None,) * 32, prompt)
    )
    moved = [len(each.offloaded) * each.width * dim for each in (omni, brutal)]
    assert moved == [24 * 2048 * 4096, 20 * prompt * 4096]
    assert moved[0] == pytest.approx(201e6, rel=2e-3) and moved[1] / moved[0] == pytest.approx(
        52, abs=0.1
    )
    # A transfer for each filter that anything waits for.
    assert len({layer for layer in omni.sources if layer >= 0}) == len(FILTERS) <= 3


def test_o13_of_the_mean_prompt_49_tokens_are_chosen():
    yi = dataclasses.replace(LONG_8B, layers=48)
    assert read_by(jaxkv.OmniKV(filter_layers=(6, 11, 30), budget=0.067), 739, yi) == 49
    assert read_by(jaxkv.OmniKV(filter_layers=(6, 11, 30), mem=0.3), 739, yi) == 49
    # With the filters that the paper then takes, fewer layers read everything, and 30% are more tokens.
    assert read_by(jaxkv.OmniKV(filter_layers=(3, 11, 30), mem=0.3), 739, yi) == 102
