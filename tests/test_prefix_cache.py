"""Prompts that continue an earlier conversation: its cache is reused, and answers are those of the whole prompt."""

import dataclasses
import threading
import time

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.engine import slots as slots_module
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.slot_shape import SlotPrograms
from jaxkv.engine.slots import Slots
from jaxkv.serving import PrefixCacheConfig
from jaxkv.serving.compiling import COMPUTING
from jaxkv.serving.prefix_cache import PrefixCache, PrefixOwner

LIMITS = {
    "slots": 2,
    "max_prompt_tokens": 200,
    "max_question_tokens": 64,
    "max_new_tokens": 8,
    "queue": 4000,
    "prefill_tokens": 1,
}
ANSWER = {"max_new_tokens": 6, "stop_at_eos": False}
FIRST, SECOND, THIRD = tiny.prompts(5, [90, 21, 13])
# It begins with another token than any of the first prompt.
OTHER = [next(token for token in range(64) if token not in FIRST), *SECOND]


def model():
    return tiny.tiny(tiny.TWO_LAYERS)


def answer(engine, prompt, **options):
    """Asks and waits; returns the ids of the answer, and how many tokens of the prompt were reused."""
    request = engine.submit(prompt, **ANSWER | options)
    return request.result().tokens.tolist(), request.stats.cached_tokens


def alone(policy, prompt, **options):
    return jaxkv.generate(model(), prompt, policy=policy, **ANSWER | options).tokens.tolist()


def turns(engine, *, parts=(FIRST, SECOND, THIRD), **options):
    """A conversation: yields each turn's whole prompt, its answer and its reused tokens."""
    prompt = []
    for part in parts:
        prompt = prompt + part
        tokens, reused = answer(engine, prompt, **options)
        yield prompt, tokens, reused
        prompt = prompt + tokens


@pytest.mark.parametrize("policy", [jaxkv.FullKV(), jaxkv.KNorm(budget=400)])
def test_later_turns_read_only_what_is_new(policy):
    """The last token of an answer did not run: the next turn reads it, too."""
    with jaxkv.Engine(model(), policy=policy, **LIMITS) as engine:
        held = 0
        for prompt, tokens, reused in turns(engine):
            assert tokens == alone(policy, prompt)
            assert reused == held
            held = len(prompt) + len(tokens) - 1


def test_a_full_cache_is_reused_up_to_the_first_token_that_differs():
    """Also for the same prompt once more, whose last token is read anew for its logits."""
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        answer(engine, FIRST)
        for prompt, shared in ((FIRST, 89), (FIRST[:69] + OTHER, 69), (FIRST[:3] + OTHER, 0)):
            assert answer(engine, prompt) == (alone(jaxkv.FullKV(), prompt), shared)


def test_a_compressed_cache_is_reused_whole_or_not_at_all():
    """Its entries are those that the policy kept of all tokens; they continue as a session's do."""
    policy = jaxkv.KeyDiff(budget=40)
    with jaxkv.Engine(model(), policy=policy, **LIMITS) as engine:
        tokens, _ = answer(engine, FIRST)
        assert answer(engine, FIRST[:80] + SECOND) == (alone(policy, FIRST[:80] + SECOND), 0)
        again, reused = answer(engine, FIRST + tokens + SECOND)
        assert reused == len(FIRST) + len(tokens) - 1
    session = jaxkv.Session(model(), policy)
    cache, found = session.sample(session.prefill([FIRST], new=80), 6, new=6)
    assert found[0].tolist() == tokens
    cache = session.extend(cache, [SECOND], new=6)
    assert session.sample(cache, 6, new=6)[1][0].tolist() == again


def test_policies_whose_choice_fits_no_longer_text_reuse_only_if_asked():
    for policies, reuses in (("auto", False), ("all", True), ("none", False)):
        config = PrefixCacheConfig(policies=policies)
        for policy in (
            jaxkv.SnapKV(budget=64),
            jaxkv.RandomKV(budget=64),
            jaxkv.H2O(budget=0.5),
            jaxkv.FullKV(),
        ):
            with jaxkv.Engine(model(), policy=policy, prefix_cache=config, **LIMITS) as engine:
                found = turns(engine, key=1)
                reused = [reused for *_, reused in found]
            full = isinstance(policy, jaxkv.FullKV) and policies == "auto"
            assert (reused[1] > 0) == (reuses or full), (policies, policy)


def test_clients_policies_and_documents_do_not_share():
    policy = jaxkv.KNorm(budget=64)
    with jaxkv.Engine(model(), policy=policy, **LIMITS) as engine:
        tokens, _ = answer(engine, FIRST, owner="a")
        following = FIRST + tokens + SECOND
        for options in ({}, {"owner": "b"}, {"owner": "a", "budget": 32}):
            assert answer(engine, following, **options)[1] == 0
        assert answer(engine, following, owner="a")[1] > 0
        document = engine.document(FIRST)
        before = engine._scheduler.prefixes.nbytes
        answer(engine, SECOND, document=document)
        assert engine._scheduler.prefixes.nbytes == before


def test_a_long_rest_is_read_in_chunks_of_a_question():
    rest = tiny.prompts(6, [100])[0]
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        answer(engine, FIRST)
        prompt = FIRST[:88] + rest
        assert answer(engine, prompt) == (alone(jaxkv.FullKV(), prompt), 88)


def test_a_conversation_without_room_is_read_whole():
    """A slot has places for one question; the policy compresses the whole text anew."""
    policy = jaxkv.KNorm(budget=20)
    limits = LIMITS | {"max_question_tokens": 16}
    with jaxkv.Engine(model(), policy=policy, **limits) as engine:
        found = list(turns(engine, parts=(FIRST, SECOND[:8], SECOND, THIRD, SECOND)))
    reused = [each for *_, each in found]
    assert reused[1] > 0 and 0 in reused[2:]
    for prompt, tokens, each in found:
        assert each or tokens == alone(policy, prompt)


@pytest.mark.parametrize("policy", [jaxkv.FullKV(), jaxkv.KNorm(budget=48)])
def test_random_conversations_stay_within_the_bytes(policy):
    """Many turns over few bytes: what is dropped is read whole, and answers of the full cache are as alone."""
    rng = np.random.default_rng(3)
    size = jaxkv.prefill(model(), FIRST, policy=policy).nbytes
    config = PrefixCacheConfig(max_bytes=4 * size)
    told, texts = [], [part.tolist() for part in rng.integers(0, 64, (6, 60))]
    with jaxkv.Engine(model(), policy=policy, prefix_cache=config, **LIMITS) as engine:
        prefixes = engine._scheduler.prefixes
        for _ in range(60):
            at = int(rng.integers(len(texts)))
            fresh = rng.integers(0, 64, int(rng.integers(1, 20))).tolist()
            prompt = texts[at] + fresh
            options = {"key": int(rng.integers(100)), "sampling": jaxkv.Sampling(temperature=0.8)}
            tokens, reused = answer(engine, prompt, **options)
            told.append((prompt, tokens, reused, options))
            texts[at] = prompt + tokens if len(prompt) < 150 else prompt[:60]
            assert prefixes.nbytes <= config.max_bytes
    reused = [each for _, _, each, _ in told]
    assert 0 in reused[10:] and sum(map(bool, reused)) > 10
    for prompt, tokens, each, options in told:
        if each == 0 or isinstance(policy, jaxkv.FullKV):
            assert tokens == alone(policy, prompt, **options)


def test_the_least_recently_used_is_dropped_first():
    cache = jaxkv.prefill(model(), FIRST, policy=jaxkv.FullKV())
    owner = PrefixOwner(policy=cache.policy, client="")
    prefixes = PrefixCache(most_bytes=2 * cache.nbytes)
    texts = [[at, *FIRST[1:]] for at in range(3)]
    for text in texts[:2]:
        prefixes.store_prefix(cache, text, owner)
    assert [each.tokens for each in prefixes.find_prefixes(texts[0] + SECOND, owner)] == [90]
    prefixes.store_prefix(cache, texts[2], owner)
    found = [list(prefixes.find_prefixes(text + SECOND, owner)) for text in texts]
    assert [len(each) for each in found] == [1, 0, 1]
    assert prefixes.nbytes <= prefixes.most_bytes
    small = PrefixCache(most_bytes=cache.nbytes // 2)
    small.store_prefix(cache, texts[0], owner)
    assert small.nbytes == 0 and not list(small.find_prefixes(texts[0] + SECOND, owner))


def test_a_prefix_that_saves_no_bucket_is_not_reused():
    """A question is padded, too."""
    assert round_up_to_bucket(90) == round_up_to_bucket(90 - 20)
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        answer(engine, FIRST[:20])
        assert answer(engine, FIRST)[1] == 0


@pytest.mark.parametrize("name", ["store_prefix", "find_prefixes"])
def test_without_memory_prompts_are_read_whole(monkeypatch, name):
    def fail(*_):
        raise MemoryError("none left")

    monkeypatch.setattr(PrefixCache, name, fail)
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        for prompt, tokens, reused in turns(engine):
            assert (tokens, reused) == (alone(jaxkv.FullKV(), prompt), 0)


@pytest.mark.parametrize(
    "policy", [jaxkv.FullKV(), jaxkv.AdaKV(budget=40), jaxkv.GlobalBudget(budget=40)]
)
def test_room_is_known_before_a_cache_is_copied(monkeypatch, policy):
    limits = {"max_prompt": 100, "max_new_tokens": 8, "max_question": 16}
    slots = Slots(jaxkv.Session(model(), policy), count=1, start=False, **limits)
    cache = jaxkv.prefill(model(), FIRST, policy=policy)
    placed = slots.place_stored_cache(cache, 1, 1)
    free = slots.shape.count_free_places(placed, slots._sliding)
    assert free == slots.shape.count_places_after_repacking(cache, slots._sliding) > 2
    monkeypatch.setattr(slots_module, "repack_through_host", lambda *_, **__: placed)
    assert slots.place_stored_cache(cache, free - 1, 1) is placed
    monkeypatch.setattr(slots_module, "repack_through_host", None)
    assert slots.place_stored_cache(cache, free, 1) is None


def test_the_next_best_prefix_is_used(monkeypatch):
    """The longest conversation has no room; the one before it has."""
    policy = jaxkv.KNorm(budget=400)
    with jaxkv.Engine(model(), policy=policy, **LIMITS) as engine:
        (_, _, _), (prompt, tokens, _) = turns(engine, parts=(FIRST, SECOND))
        place = engine._slots.place_stored_cache

        def fail(cache, *given):
            return None if int(cache.seen[0]) > 100 else place(cache, *given)

        monkeypatch.setattr(engine._slots, "place_stored_cache", fail)
        following = prompt + tokens + THIRD
        assert answer(engine, following) == (alone(policy, following), 95)


def test_conversations_are_stored_beside_the_engine(monkeypatch):
    """The next turn waits for its own, and for no other; while two are being stored no third one is."""
    stored, go_on, store = [], threading.Event(), PrefixCache.store_prefix

    def slow(prefixes, cache, ids, owner):
        stored.append(ids)
        assert go_on.wait(60)
        store(prefixes, cache, ids, owner)

    monkeypatch.setattr(PrefixCache, "store_prefix", slow)
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        tokens, _ = answer(engine, FIRST)
        following = FIRST + tokens + SECOND
        request = engine.submit(following, **ANSWER)
        assert answer(engine, OTHER) == (alone(jaxkv.FullKV(), OTHER), 0)
        third = [OTHER[0] ^ 1, *THIRD]
        answer(engine, third)
        assert len(stored) == 2 and engine.stats.waiting == 1
        go_on.set()
        assert request.result(60).tokens.tolist() == alone(jaxkv.FullKV(), following)
        assert request.stats.cached_tokens == 95
        # What is answered while the engine closes is not stored.
        before, last = len(stored), engine.submit(THIRD, **ANSWER | {"max_new_tokens": 8})
        engine.close()
        assert last.result(0).tokens.size == 8
    assert before == len(stored) <= 3


def test_without_a_thread_conversations_are_not_stored(monkeypatch):
    """The engine answers on, and stores the next conversation."""
    tried = threading.Semaphore(0)

    def fail(_):
        tried.release()
        raise RuntimeError("can't start new thread")

    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for _ in range(2):
                tokens, _ = answer(engine, FIRST)
                assert tried.acquire(timeout=60)
        following = FIRST + tokens + SECOND
        assert answer(engine, following) == (alone(jaxkv.FullKV(), following), 0)
        assert answer(engine, following)[1] > 0


def test_programs_compile_for_a_prefix_that_was_missed():
    """Beside an engine that computes, nothing else compiles."""

    class Busy:
        pass

    busy = Busy()
    COMPUTING.add(busy)
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), precompile=False, **LIMITS) as engine:
        answer(engine, FIRST)
        question = SlotPrograms(kind="question", length=64)
        assert question in engine._slots.uncompiled
        assert answer(engine, FIRST + OTHER)[1] == 0
        deadline = time.monotonic() + 300
        while question in engine._slots.uncompiled:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert answer(engine, FIRST + OTHER)[1] > 90
        COMPUTING.discard(busy)


def test_engines_that_cannot_reuse_prefixes():
    limits = {name: value for name, value in LIMITS.items() if name != "max_question_tokens"}
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **limits) as engine:
        assert [reused for *_, reused in turns(engine)] == [0, 0, 0]
    asked = PrefixCacheConfig(policies="all")
    with pytest.raises(ValueError, match="prefix_cache="):
        jaxkv.Engine(model(), prefix_cache=asked, **limits)
    with pytest.raises(ValueError, match="policies="):
        PrefixCacheConfig(policies="some")
    with pytest.raises(ValueError, match="max_bytes=-1"):
        dataclasses.replace(asked, max_bytes=-1)


def test_several_answers_and_cancelled_ones():
    """Answers to one prompt share the reused cache; what is cancelled is not stored."""
    with jaxkv.Engine(model(), policy=jaxkv.FullKV(), **LIMITS) as engine:
        answer(engine, FIRST)
        sampling = jaxkv.Sampling(temperature=0.9)
        first = engine.submit(FIRST + SECOND, key=[1, 2, 3], sampling=sampling, **ANSWER)
        for key, request in zip((1, 2, 3), (first, *first.others), strict=True):
            expected = alone(jaxkv.FullKV(), FIRST + SECOND, key=key, sampling=sampling)
            assert request.result().tokens.tolist() == expected
            assert request.stats.cached_tokens >= 90
        prefixes = engine._scheduler.prefixes
        size = jaxkv.prefill(model(), FIRST + SECOND, policy=jaxkv.FullKV()).nbytes
        gone = engine.submit(THIRD * 9, **ANSWER)
        gone.cancel()
        assert answer(engine, THIRD * 9 + SECOND)[1] in (0, 117)
        # Not one for each of the three answers.
        assert prefixes.nbytes < 5 * size
    assert prefixes.nbytes == 0
