"""Visible attention: against loops over what caches hold and filter layers choose, and as a task."""

import dataclasses
import functools

import jax
import numpy as np
import oracles as o
import pytest
import tiny
from evaluating import words
from looking import CONFIG, HEADS, TEXTS, shown, weights

import jaxkv
from jaxkv import D2O, H2O, AdaKV, FullKV, OmniKV, SnapKV
from jaxkv.cache import repack_cache
from jaxkv.evals import TASKS, How, VisibleAttentionTask, measure_visible_attention

STEPS = 4
PROMPT, ANSWER = TEXTS[0][:-STEPS], TEXTS[0][-STEPS:]


def expected(seen):
    """By step: full attention on positions `seen(layer, head, step)`, averaged over layers and query heads."""
    out = np.zeros(STEPS)
    for step, layer, head in np.ndindex(STEPS, CONFIG.layers, HEADS):
        paid = weights(0, layer)[head, len(PROMPT) + step]
        out[step] += (
            paid[sorted(seen(layer, head // CONFIG.group_size, step))].sum() / CONFIG.layers / HEADS
        )
    return out


@functools.cache
def held(policy):
    """What a cache holds before each token of the answer, by layer and head."""
    model = tiny.tiny(CONFIG)
    cache, _, _ = tiny.run(model, [PROMPT], policy)
    cache, session, out = repack_cache(cache, headroom=STEPS), jaxkv.Session(model, policy), []
    for token in ANSWER:
        out.append([layer[0] for layer in tiny.kept(cache)])
        cache = session.recompress_sequences(
            session.extend(cache, [[token]], chunk=1, donate=True), headroom=STEPS
        )
    return out


ADA = AdaKV(base=SnapKV(budget=12, window=4))


AGAIN = SnapKV(budget=12, window=4, every=2)


@pytest.mark.parametrize("policy", [ADA, H2O(budget=12), AGAIN])
def test_policies_that_drop_rows_see_what_their_caches_hold(policy):
    found, rows = measure_visible_attention(tiny.tiny(CONFIG), policy, PROMPT, ANSWER)
    oracle = expected(
        lambda layer, head, step: {*held(policy)[step][layer][head], len(PROMPT) + step}
    )
    np.testing.assert_allclose(found, oracle, atol=1e-5)
    assert rows == 12 and (found < 0.95).all()
    lengths = [len(head) for layer in held(policy)[-1] for head in layer]
    # With `every` the second token of the answer is the last straw, and the third comes on top.
    assert sum(lengths) == 6 * {H2O(budget=12): 12, AGAIN: 13}.get(policy, 12 + STEPS - 1)


@pytest.mark.parametrize(
    ("options", "window"),
    [({}, 1), ({"selector": "exponential", "window": 3}, 3), ({"include_generated": True}, 1)],
    ids=["last", "exponential", "generated"],
)
def test_layers_above_a_filter_see_what_it_chooses(options, window):
    policy = OmniKV(budget=12, filter_layers=(0,), adjacent=0, **options)
    found, rows = measure_visible_attention(tiny.tiny(CONFIG), policy, PROMPT, ANSWER)
    candidates = lambda now: now if options.get("include_generated") else len(PROMPT)  # noqa: E731

    def seen(layer, head, step):
        now = len(PROMPT) + step
        if layer == 0:
            return range(now + 1)
        score = np.zeros(len(TEXTS[0]))
        for age in range(window):
            q, k, _, _ = shown(0)[0]
            # Probabilities are among the tokens that can be chosen; a query of before is asked about those it saw.
            paid = o.causal_probs(q, k, rows=[now - age])[0][:, 0]
            paid[:, candidates(now) :] = 0
            score += 0.5**age * (paid / paid.sum(axis=1, keepdims=True)).max(axis=0)
        last = [] if window == 1 else [j for j in range(len(PROMPT)) if j > now - window]
        order = sorted(range(candidates(now)), key=lambda j: (j not in last, -score[j], j))
        return {*order[:12], *range(candidates(now), now + 1)}

    np.testing.assert_allclose(found, expected(seen), atol=1e-5)
    assert rows == pytest.approx((len(PROMPT) + 2 * 12) / 3)


def test_everything_is_seen_where_everything_is_kept():
    for policy in (FullKV(), jaxkv.BrutalOffload(resident_layers=1)):
        found, rows = measure_visible_attention(tiny.tiny(CONFIG), policy, PROMPT, ANSWER)
        np.testing.assert_allclose(found, 1, atol=1e-6)
        assert rows == len(PROMPT)


def test_on_a_mesh_it_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="^mesh="):
        measure_visible_attention(tiny.tiny(CONFIG).on(mesh), ADA, PROMPT, ANSWER)


def test_the_task_has_cases_of_all_sizes(monkeypatch):
    assert TASKS["visible"] is VisibleAttentionTask
    model, task = tiny.tiny(CONFIG), VisibleAttentionTask(count=4, steps=3)
    cases = task.samples(model)
    assert len({case.id for case in cases}) == 4 and {case.group for case in cases} == {"visible"}
    assert [case.tags["size"] for case in cases] == [40, 80, 120, 160]
    assert task.samples(model) == cases != dataclasses.replace(task, seed=1).samples(model)
    monkeypatch.setattr(model, "text", words().text)
    monkeypatch.setattr(
        "jaxkv.evals.retrieval.encode_sample", lambda text, sample, raw: (PROMPT, TEXTS[1][:4])
    )
    outcomes = task.run(model, D2O(budget=0.5), cases[:1], How())
    for outcome in outcomes:
        assert len(outcome.figures["visible"]) == 3 and 0.3 < outcome.score < 1
        assert (
            outcome.score == pytest.approx(np.mean(outcome.figures["visible"]))
            and outcome.tokens == len(PROMPT) + 4
        )
