"""Long answers and many turns: rooms come in sizes that repeat, and every compilation is told as such."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.engine import headroom as rooms
from jaxkv.engine.headroom import MOST_AHEAD, compute_headroom
from jaxkv.engine.plan import plan_prefill
from jaxkv.machine.compilation import StageClock
from jaxkv.policies import LinearLayers

BACKEND = "/jax/core/compile/backend_compile_duration"
POLICIES = {
    "full": jaxkv.FullKV(),
    "h2o": jaxkv.H2O(budget=64),
    "every": jaxkv.SnapKV(budget=64, every=64),
}


@pytest.fixture(scope="module")
def model():
    return tiny.tiny(dataclasses.replace(tiny.MODELS["mha"], max_positions=8192))


class Listener:
    """What JAX itself tells of compilation."""

    def __init__(self):
        self.programs, self.seconds = 0, 0.0

    def __call__(self, event, duration_secs, **_):
        self.programs += event == BACKEND
        # What another thread compiles meanwhile is not waited for.
        if threading.current_thread() is threading.main_thread():
            self.seconds += duration_secs * event.startswith("/jax/core/compile/backend")

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self)


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_answer_compiles_at_its_beginning(model, name):
    prompt = tiny.prompts(0, [600])[0]
    tokens, late = 0, None
    with Listener() as events:
        options = {
            "max_new_tokens": 2000,
            "stop_at_eos": False,
            "stream": True,
            "stream_interval": 8,
        }
        stream = jaxkv.generate(model, prompt, policy=POLICIES[name], **options)
        for _ in stream:
            tokens += 8
            late = events.programs if tokens == 256 else late
    stats = stream.result.stats
    assert stats.new_tokens == 2000 and late is not None
    assert (events.programs - late) / (2000 - 256) <= 1 / 1000
    # What it holds is what was planned before the first token.
    lengths = [len(prompt)]
    headroom = rooms.compute_prefill_headroom(
        POLICIES[name].build_policy_parts(), model.config.sliding_windows, np.asarray(lengths), 2000
    )
    planned = plan_prefill(model.config, POLICIES[name], lengths, headroom=headroom)
    assert stats.allocated_bytes <= planned.cache_bytes


def test_all_compilation_is_told(model):
    prompt = tiny.prompts(1, [90])[0]
    # Budgets that no other test has: their programs are made here.
    for policy in (jaxkv.AdaKV(base=jaxkv.SnapKV(budget=45)), jaxkv.SnapKV(budget=47, every=53)):
        options = {"max_new_tokens": 70, "stop_at_eos": False}
        with Listener() as events:
            out = jaxkv.generate(model, prompt, policy=policy, **options)
        assert out.stats.compiled_programs == events.programs > 0
        assert out.stats.compile_seconds >= events.seconds
        # Wall-clock, of which compilation is a part: what a device runs meanwhile takes no less for it.
        assert out.stats.prefill_seconds + out.stats.decode_seconds >= out.stats.compile_seconds
        with Listener() as events:
            more = jaxkv.generate(model, prompt, cache=out.cache, **options)
        assert more.stats.compiled_programs == events.programs > 0
        with Listener() as events:
            same = jaxkv.generate(model, prompt, policy=policy, **options)
        assert (events.programs, same.stats.compiled_programs, same.stats.compile_seconds) == (
            0,
            0,
            0.0,
        )


FRESH = """
import sys, jax, jaxkv
events = []
model = jaxkv.load(sys.argv[1], progress=False)
event = "/jax/core/compile/backend_compile_duration"
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name) if name == event else 0)
out = jaxkv.generate(model, [[5] * 40], max_new_tokens=20, progress=False)
assert out.stats.compiled_programs == len(events) > 0, (out.stats.compiled_programs, len(events))
"""


def test_all_compilation_is_told_in_a_fresh_process():
    # Here the smallest programs, which every process makes once, are not there yet.
    folder = Path(__file__).parent / "golden" / "models" / "llama_gqa"
    done = subprocess.run(
        [sys.executable, "-c", FRESH, folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "policy", [jaxkv.AdaKV(base=jaxkv.SnapKV(budget=24, window=8)), jaxkv.H2O(budget=24)]
)
def test_questions_of_up_to_64_tokens_share_programs(model, policy):
    # So long that the whole text stays in one bucket, which evicting policies compile for.
    cache = jaxkv.prefill(model, tiny.prompts(3, [140]), policy=policy)
    options = {"cache": cache, "max_new_tokens": 10, "stop_at_eos": False}
    first, *others = (
        jaxkv.generate(model, tiny.prompts(4, each), **options)
        for each in ([16, 5], [18, 3], [40, 64])
    )
    assert [each.stats.compiled_programs for each in others] == [0, 0]
    # Padding changes no answer.
    alone = jaxkv.generate(model, tiny.prompts(4, [16]), **options)
    np.testing.assert_array_equal(alone[0].tokens, first[0].tokens)


def test_a_clock_counts_nested_compilations_once():
    clock = StageClock()
    with clock:
        jax.jit(lambda x: jax.jit(lambda y: y * 3)(x) + 1)(np.float32(2))
    assert clock.programs == 1
    assert 0 < clock.compile_seconds <= clock.seconds
    before = clock.compile_seconds
    jax.jit(lambda x: x * 5)(np.float32(2))
    assert (clock.programs, clock.compile_seconds) == (1, before)


GROWING = {
    # Prompts shorter than the budget grow to it; some layers have no limit.
    "h2o": jaxkv.H2O(budget=120),
    "every": jaxkv.SnapKV(budget=100, window=8, every=40),
    "d2o": jaxkv.D2O(budget=24, official=True),
}


@pytest.mark.parametrize("name", GROWING)
def test_an_answer_that_outgrows_its_room(monkeypatch, model, name):
    prompts, policy = tiny.prompts(2, [40, 31]), GROWING[name]
    options = {"max_new_tokens": 70, "stop_at_eos": False}

    def answers():
        out = jaxkv.generate(model, prompts, policy=policy, **options)
        return out, jaxkv.generate(model, [[5, 6, 7], [8]], cache=out.cache, **options)

    expected = answers()
    monkeypatch.setattr(rooms, "MOST_AHEAD", 16)
    monkeypatch.setattr(sys.modules["jaxkv.engine.session"], "MOST_AHEAD", 16)
    with Listener() as events:
        found = answers()
    # 16, 32, 64 ... rows: two programs a size, not one for every 16 tokens; fewer where sizes were met before.
    assert events.programs <= 40
    for one, other in zip(found, expected, strict=True):
        for row in range(2):
            np.testing.assert_array_equal(one[row].tokens, other[row].tokens)
        np.testing.assert_array_equal(one.cache.kept, other.cache.kept)


def test_rooms_repeat_and_double():
    appending, one = jaxkv.SnapKV(budget=64).build_policy_parts(), np.zeros(1, np.int64)
    assert [
        int(compute_headroom(appending, (None,), one, new)[0]) for new in (5, 17, 200, 300, 2000)
    ] == [
        16,
        32,
        256,
        512,
        2048,
    ]
    assert compute_headroom(appending, (None,), one, 100_000)[0] == MOST_AHEAD
    assert compute_headroom(appending, (None,), one, 100_000, grown=6000)[0] == 6144
    # A row goes for each that comes: one spare row, and what is left to the limit.
    assert compute_headroom(jaxkv.H2O(budget=64).build_policy_parts(), (None,), one, 2000)[0] == 1
    assert (
        compute_headroom(jaxkv.H2O(budget=64).build_policy_parts(), (None,), one + 40, 2000)[0]
        == 65
    )
    assert (
        compute_headroom(
            jaxkv.SnapKV(budget=64, every=50).build_policy_parts(), (None,), one, 2000
        )[0]
        == 50
    )


def test_ten_turns_meet_few_shapes(model):
    cache, shapes = (
        jaxkv.prefill(model, tiny.prompts(3, [100])[0], policy=jaxkv.SnapKV(budget=64)),
        set(),
    )
    for turn, question in enumerate(tiny.prompts(4, np.random.default_rng(0).integers(3, 60, 10))):
        cache = jaxkv.generate(
            model, question, cache=cache, max_new_tokens=30 + turn, stop_at_eos=False
        ).cache
        shapes.add(tuple(pool.row_count for pool in cache.pools))
    assert len(shapes) <= 4, shapes


def test_rolling_positions_go_beyond_what_the_model_was_made_for():
    short = tiny.tiny(dataclasses.replace(tiny.MODELS["mha"], max_positions=64))
    long = tiny.tiny(dataclasses.replace(tiny.MODELS["mha"], max_positions=512))
    prompt = tiny.prompts(5, [50])[0]
    policy = jaxkv.StreamingLLM(budget=24, rolling_positions=True, every=16)
    options = {"policy": policy, "max_new_tokens": 200, "stop_at_eos": False}
    out = jaxkv.generate(short, prompt, **options)
    np.testing.assert_array_equal(out.tokens, jaxkv.generate(long, prompt, **options).tokens)
    assert int(out.cache.seen[0]) == 250 and out.cache.kept.max() <= 24 + 16
    after = jaxkv.generate(
        short, prompt[:10], cache=out.cache, max_new_tokens=100, stop_at_eos=False
    )
    assert len(after.tokens) == 100
    with pytest.raises(
        ValueError, match=r"prompt='65 tokens, those kept included': the model was made for 64"
    ):
        jaxkv.generate(short, prompt + prompt[:15], **options)
    endless = jaxkv.StreamingLLM(budget=24, rolling_positions=True)
    assert (
        len(
            jaxkv.generate(
                short, prompt, **(options | {"policy": endless, "max_new_tokens": 40})
            ).tokens
        )
        == 40
    )
    with pytest.raises(
        ValueError, match=r"max_new_tokens=41: 65 entries would be kept .* give every=64"
    ):
        jaxkv.generate(short, prompt, **(options | {"policy": endless, "max_new_tokens": 41}))
    with pytest.raises(ValueError, match="prompt='90 tokens, 40 new ones included'"):
        jaxkv.generate(short, prompt, policy=jaxkv.StreamingLLM(budget=24), max_new_tokens=40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollingPyramid(jaxkv.StreamingLLM):
    """Positions within the cache, and layers that hold different numbers of rows."""

    rolling_positions: bool = True

    def build_policy_parts(self):
        return super().build_policy_parts().replace(layers=LinearLayers(beta=4))


def test_rolling_positions_where_layers_hold_different_rows():
    model = tiny.tiny(tiny.TWO_LAYERS)
    prompts, policy = tiny.prompts(6, [60, 37]), RollingPyramid(budget=20)
    options = {"max_new_tokens": 12, "stop_at_eos": False}
    both = jaxkv.generate(model, prompts, policy=policy, **options)
    kept = both.cache.kept[:, 0, 0]
    assert len(set(kept.tolist())) > 1
    for prompt, tokens in zip(prompts, (each.tokens for each in both), strict=True):
        alone = jaxkv.generate(model, prompt, policy=policy, **options)
        np.testing.assert_array_equal(alone.tokens, tokens)
        # The next token does not depend on whether rows were read back one at a time or all at once.
        cache = jaxkv.prefill(model, prompt, policy=policy)
        first = jaxkv.generate(
            model, tokens[:6].tolist(), cache=cache, max_new_tokens=1, stop_at_eos=False
        )
        assert first.tokens[0] == tokens[6]
