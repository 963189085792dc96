"""Long answers and many turns: rooms come in sizes that repeat, and every compilation is told as such."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.compilation import Clock
from jaxkv.models import room as rooms
from jaxkv.models.room import MOST_AHEAD, room_for

BACKEND = "/jax/core/compile/backend_compile_duration"
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=64),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=64)),
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
    with Listener() as heard:
        stream = jaxkv.generate(
            model, prompt, policy=POLICIES[name], max_new_tokens=2000, stop_at_eos=False, stream=True
        )
        for _ in stream:
            # The stream's looks are 8 tokens apart.
            tokens += 8
            late = heard.programs if tokens == 256 else late
    stats = stream.result.stats
    assert stats.new_tokens == 2000 and late is not None
    assert (heard.programs - late) / (2000 - 256) <= 1 / 1000
    # What it holds is what was planned before the first token.
    lengths = [len(prompt)]
    room = rooms.first_room(POLICIES[name], model.config.layers, np.asarray(lengths), 2000)
    planned = jaxkv.plan(model.config, POLICIES[name], lengths, room=room)
    assert stats.allocated_bytes <= planned.cache_bytes


def test_all_compilation_is_told(model):
    prompt = tiny.prompts(1, [90])[0]
    jax.clear_caches()
    sys.modules["jaxkv.models.prefill"].forget_compiled()
    for policy in (POLICIES["adakv"], POLICIES["every"]):
        with Listener() as heard:
            out = jaxkv.generate(model, prompt, policy=policy, max_new_tokens=70, stop_at_eos=False)
            out = jaxkv.generate(model, prompt, cache=out.cache, max_new_tokens=8, stop_at_eos=False)
        with Listener() as again:
            same = jaxkv.generate(model, prompt, policy=policy, max_new_tokens=70, stop_at_eos=False)
        assert heard.programs > 0 and out.stats.compiled_programs > 0
        assert (again.programs, same.stats.compiled_programs) == (0, 0)
        assert same.stats.compile_seconds < 0.5 * heard.seconds
    with Listener() as heard:
        out = jaxkv.generate(model, prompt, policy=jaxkv.KNorm(budget=31), max_new_tokens=300, stop_at_eos=False)
    assert out.stats.compiled_programs == heard.programs > 0
    assert out.stats.compile_seconds >= heard.seconds


def test_a_clock_counts_nested_compilations_once():
    clock = Clock()
    with clock:
        jax.jit(lambda x: jax.jit(lambda y: y * 3)(x) + 1)(np.float32(2))
    assert clock.programs == 1
    assert 0 < clock.compile_seconds <= clock.seconds
    assert clock.running_seconds == clock.seconds - clock.compile_seconds
    before = clock.compile_seconds
    jax.jit(lambda x: x * 5)(np.float32(2))
    assert (clock.programs, clock.compile_seconds) == (1, before)


def test_an_answer_that_outgrows_its_room(monkeypatch, model):
    prompt = tiny.prompts(2, [40])[0]
    options = {"max_new_tokens": 150, "stop_at_eos": False}
    for policy in (jaxkv.SnapKV(budget=24, window=8), jaxkv.AdaKV(base=jaxkv.SnapKV(budget=24, window=8))):
        expected = jaxkv.generate(model, prompt, policy=policy, **options)
        with monkeypatch.context() as patch:
            patch.setattr(rooms, "MOST_AHEAD", 16)
            patch.setattr(sys.modules["jaxkv.answering"], "MOST_AHEAD", 16)
            grown = jaxkv.generate(model, prompt, policy=policy, **options)
        np.testing.assert_array_equal(grown.tokens, expected.tokens)
        np.testing.assert_array_equal(grown.cache.kept, expected.cache.kept)


def test_rooms_repeat_and_double():
    appending, one = jaxkv.SnapKV(budget=64), np.zeros(1, np.int64)
    assert [int(room_for(appending, one, new)[0]) for new in (5, 17, 200, 300, 2000)] == [16, 32, 256, 512, 2048]
    assert room_for(appending, one, 100_000)[0] == MOST_AHEAD
    assert room_for(appending, one, 100_000, grown=6000)[0] == 6144
    # A row goes for each that comes: one spare row, and what is left to the limit.
    assert room_for(jaxkv.H2O(budget=64), one, 2000)[0] == 1
    assert room_for(jaxkv.H2O(budget=64), one + 40, 2000)[0] == 65
    assert room_for(jaxkv.SnapKV(budget=64, every=50), one, 2000)[0] == 50


def test_ten_turns_meet_few_shapes(model):
    cache, shapes = jaxkv.prefill(model, tiny.prompts(3, [100])[0], policy=jaxkv.SnapKV(budget=64)), set()
    for turn, question in enumerate(tiny.prompts(4, np.random.default_rng(0).integers(3, 60, 10))):
        cache = jaxkv.generate(model, question, cache=cache, max_new_tokens=30 + turn, stop_at_eos=False).cache
        shapes.add(tuple(pool.rows for pool in cache.pools))
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
    after = jaxkv.generate(short, prompt[:10], cache=out.cache, max_new_tokens=100, stop_at_eos=False)
    assert len(after.tokens) == 100
    with pytest.raises(ValueError, match=r"prompt='65 tokens, those kept included': the model was made for 64"):
        jaxkv.generate(short, prompt + prompt[:15], **options)
    endless = jaxkv.StreamingLLM(budget=24, rolling_positions=True)
    assert len(jaxkv.generate(short, prompt, **(options | {"policy": endless, "max_new_tokens": 40})).tokens) == 40
    with pytest.raises(ValueError, match=r"max_new_tokens=41: 65 rows would be kept .* give every=64"):
        jaxkv.generate(short, prompt, **(options | {"policy": endless, "max_new_tokens": 41}))
    with pytest.raises(ValueError, match="prompt='90 tokens, 40 new ones included'"):
        jaxkv.generate(short, prompt, policy=jaxkv.StreamingLLM(budget=24), max_new_tokens=40)
