"""Prompts that are prefilled together: each gets what it gets alone, whatever becomes of the others of its batch."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest
import slot_runs as runs
import tiny
from policy_table import BY_NAME

import jaxkv
from jaxkv.engine.progress import run_generator
from jaxkv.engine.slot_shape import SlotPrograms
from jaxkv.engine.slots import Slots
from jaxkv.policies import KeyNorm
from jaxkv.policies.wrapper import replace_policy_budget
from jaxkv.serving import slot_memory
from jaxkv.serving.document_store import DocumentCacheStore
from jaxkv.serving.prefix_cache import PrefixCache
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.work import PrefillWork, RequestWork
from jaxkv.text.prompts import encode_prompts

BATCH, BUCKET = 4, 64
POLICY = jaxkv.KNorm(budget=20)


@dataclasses.dataclass(frozen=True)
class Picky(KeyNorm):
    """Scores that are NaN for prompts of 50 tokens."""

    def score_entries(self, seen):
        bad = (seen.length == 50)[:, None, None]
        return jnp.where(bad, jnp.nan, super().score_entries(seen))


def model():
    return tiny.tiny(tiny.TWO_LAYERS)


def asked(lengths, *, seed=3):
    """Requests with prompts of these lengths; samplers take turns."""
    given = runs.requests(seed, len(lengths), sampled=True, shortest=BUCKET)
    return [
        dataclasses.replace(each, prompt=each.prompt[:length], eos=())
        for each, length in zip(given, lengths, strict=True)
    ]


def work_of(each, **options):
    """A request as an engine's scheduler gets it."""
    options = {"key": None, "policy": POLICY, "deadline": None, "text": None} | options
    if options["key"] is None:
        options["key"] = jaxkv.arguments.validate_random_key(each.seed)
    encoded = encode_prompts(each.prompt, None, model().config, close=True)
    options |= {"new": each.new, "sampling": each.sampling, "stops": (), "eos": ()}
    return RequestWork(encoded=encoded, offline=False, **options)


class Driven:
    """A scheduler stepped by hand, and the numbers of prompts of its prefills."""

    def __init__(self, folder, policy=POLICY, *, question=0, **options):
        slots = runs.made(
            model(),
            policy,
            count=BATCH,
            max_question=question,
            prefill_tokens=BATCH * BUCKET,
            **options,
        )
        documents = DocumentCacheStore(
            model(), slots.session.policy, shape=slots.shape, most_bytes=10**9, folder=folder
        )
        prefixes = PrefixCache(most_bytes=10**9) if question else None
        self.slots, self.batches, self.fail = slots, [], lambda prompts: None
        self.scheduler = Scheduler(slots, documents, ahead=BATCH, prefixes=prefixes)
        self._prefill, slots.iterate_prefill = slots.iterate_prefill, self._count

    def _count(self, encoded, **options):
        self.batches.append(len(encoded.ids))
        self.fail(len(encoded.ids))
        return (yield from self._prefill(encoded, **options))

    def run(self, works):
        self.scheduler.waiting.extend(works)
        while not self.scheduler.is_idle:
            self.scheduler.run_scheduler_step()
        return self.batches

    def check(self, works, given, policy=POLICY):
        for work, each in zip(works, given, strict=True):
            tokens = work.request.result(0).tokens.tolist()
            assert tokens == runs.alone(model(), policy, each), each


@pytest.fixture
def driven(tmp_path):
    return Driven(tmp_path)


@pytest.mark.parametrize("name", ["adakv", "h2o"])
def test_prompts_of_a_bucket_are_read_together(tmp_path, name):
    """Lengths, samplers and seeds differ; a prompt of another bucket is read in its turn, and nothing compiles."""
    policy = BY_NAME[name].policy(20)
    given = asked([64, 20, 33, 40, 57, 64, 35, 41])
    driven = Driven(tmp_path, policy)
    works = [work_of(each, policy=policy) for each in given]
    with jaxkv.machine.compilation.StageClock() as clock:
        assert driven.run(works) == [4, 1, 2, 1]
    assert clock.programs == 0
    driven.check(works, given, policy)
    assert [work.request.stats.kept for work in works] == [20] * 8


def test_a_cancelled_prompt_leaves_its_batch(driven):
    given = asked([64, 40, 50, 33])
    works = [work_of(each) for each in given]
    driven.scheduler.waiting.extend(works)
    driven.scheduler.run_scheduler_step()
    assert driven.scheduler.active_prefills == 1 and not driven.scheduler.waiting
    works[1].request.cancel()
    works[2].deadline = 0.0
    driven.run([])
    assert driven.batches == [4] and works[1].request.cancelled
    with pytest.raises(TimeoutError):
        works[2].request.result(0)
    driven.check([works[0], works[3]], [given[0], given[3]])
    assert driven.scheduler.answered == 2 and driven.slots.done.all()


def test_an_error_of_one_prompt_is_its_own(tmp_path):
    """The others are read alone, and so is whoever comes later with them."""
    policy = jaxkv.CustomPolicy(budget=20, scorer=Picky())
    driven, given = Driven(tmp_path, policy), asked([64, 50, 33, 41])
    works = [work_of(each, policy=policy) for each in given]
    assert driven.run(works) == [4, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="scores='NaN'"):
        works.pop(1).request.result(0)
    del given[1]
    driven.check(works, given, policy)
    again = [work_of(each, policy=policy) for each in given]
    assert driven.run(again)[5:] == [2, 1]
    driven.check(again, given, policy)


def test_a_batch_without_memory_is_read_one_by_one(driven):
    def fail(prompts):
        if prompts > 1:
            raise MemoryError("none left")

    driven.fail = fail
    given = asked([64, 50, 33])
    works = [work_of(each) for each in given]
    assert driven.run(works) == [2, 1, 1, 1]
    driven.check(works, given)


@pytest.mark.parametrize("error", [MemoryError, jax.errors.JaxRuntimeError])
def test_a_prompt_without_memory_for_its_copy_is_read_again(driven, error):
    """Its sequence is copied out of the batch; the others of the batch stay."""
    begin = driven.slots.begin_sequence

    def fail(cache, *, row, **options):
        if (len(cache.seen), row) == (4, 2):
            raise error("none left")
        return begin(cache, row=row, **options)

    driven.slots.begin_sequence = fail
    given = asked([64, 50, 33, 41])
    works = [work_of(each) for each in given]
    assert driven.run(works) == [4, 1]
    driven.check(works, given)


def test_prompts_are_chosen_without_memory_for_conversations(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("none left")

    driven, given = Driven(tmp_path, question=8), asked([64, 50])
    monkeypatch.setattr(PrefixCache, "find_prefixes", fail)
    works = [work_of(each) for each in given]
    assert driven.run(works) == [1, 1]
    driven.check(works, given)


def test_prompts_with_several_answers_are_read_alone(monkeypatch):
    """In a batch, each of their answers would copy the cache; others after them are read together."""
    batches, asked_all, prefill = [], threading.Event(), Slots.iterate_prefill

    def count(slots, encoded, **options):
        assert asked_all.wait(60)
        batches.append(len(encoded.ids))
        return (yield from prefill(slots, encoded, **options))

    monkeypatch.setattr(Slots, "iterate_prefill", count)
    limits = {"slots": 8, "max_prompt_tokens": 64, "max_new_tokens": 4, "prefill_tokens": 256}
    options = {"max_new_tokens": 4, "stop_at_eos": False, "sampling": jaxkv.Sampling()}
    prompts = [each.prompt for each in asked([64, 50, 33, 41, 60])]
    keys = [[1, 2]] * 3 + [[3]] * 2
    with jaxkv.Engine(model(), policy=POLICY, **limits) as engine:
        requests = [
            engine.submit(prompt, key=key, **options)
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        asked_all.set()
        for request, prompt, key in zip(requests, prompts, keys, strict=True):
            for each, seed in zip((request, *request.others), key, strict=True):
                alone = jaxkv.generate(model(), prompt, policy=POLICY, seed=seed, **options)
                assert each.result(60).tokens.tolist() == alone.tokens.tolist()
    assert batches == [1, 1, 1, 2]


def test_who_is_read_apart(tmp_path):
    """Other budgets, documents, questions, continued conversations; answers to one prompt share a row."""
    driven = Driven(tmp_path, question=8)
    given = asked([64, 64, 40, 40])
    own = [POLICY, *[replace_policy_budget(POLICY, rows) for rows in (12, 12, 15)]]
    works = [work_of(each, policy=policy) for each, policy in zip(given, own, strict=True)]
    assert driven.run(works) == [1, 2, 1]
    for work, each, policy in zip(works, given, own, strict=True):
        driven.check([work], [each], policy)
    driven.scheduler.prefixes.drop_all_prefixes()
    del driven.batches[:]

    first = dataclasses.replace(given[0], prompt=given[0].prompt[:50], new=6)
    work = work_of(first)
    driven.run([work])
    following = dataclasses.replace(first, prompt=first.prompt + work.sampled + [5], new=4)
    document = PrefillWork(
        encoded=encode_prompts(given[1].prompt, None, model().config, close=True),
        key=None,
        policy=POLICY,
        deadline=None,
        alone=True,
    )
    shared = [work_of(given[2])]
    shared += [dataclasses.replace(shared[0], key=work.key, further=True, alone=True)]
    shared[1].request = jaxkv.serving.requests.Request()
    shared[1].__post_init__()
    works = [work_of(given[3]), work_of(following), document, *shared, work_of(given[1])]
    assert driven.run(works)[1:] == [2, 1, 1]
    assert works[1].request.stats.cached_tokens == 55
    assert document.future.result(0).tokens == 64
    driven.check([works[0], shared[0], works[-1]], [given[3], given[2], given[1]])
    driven.check(shared[1:], [dataclasses.replace(given[2], seed=first.seed)])


def test_policies_that_draw_read_each_prompt_with_its_key(tmp_path):
    policy = BY_NAME["random"].policy(20)
    driven, given = Driven(tmp_path, policy), asked([64, 50, 33])
    works = [work_of(each, policy=policy) for each in given]
    assert driven.run(works) == [1, 1, 1]
    driven.check(works, given, policy)


def test_batches_that_are_not_compiled_are_not_waited_for(driven):
    """They are compiled soon, as no waiting request needs them."""
    pair = SlotPrograms(kind="prompt", length=BUCKET, batch=2)
    whole = dataclasses.replace(pair, batch=BATCH)
    driven.slots.uncompiled |= {whole: None, pair: None}
    given = asked([64] * 4)
    works = [work_of(each) for each in given]
    driven.scheduler.waiting.extend(works)
    driven.scheduler.run_scheduler_step()
    assert driven.batches == [1] and driven.scheduler.first_wanted_programs == whole
    run_generator(driven.slots.compile_further_programs(whole))
    run_generator(driven.slots.compile_further_programs(pair))
    assert driven.run([])[1:] == [2, 1]
    driven.check(works, given)


def test_programs_may_compile_while_prompts_are_chosen(driven, monkeypatch):
    """Whenever the scheduler looks at programs, another thread has compiled one more."""
    pending = driven.slots.uncompiled
    pending |= {SlotPrograms(kind="question", length=size): None for size in range(1, 20)}
    hash_of = SlotPrograms.__hash__

    def compile_one(programs):
        if pending and programs.kind == "question":
            pending.popitem()
        return hash_of(programs)

    monkeypatch.setattr(SlotPrograms, "__hash__", compile_one)
    given = asked([64, 50])
    works = [work_of(each) for each in given]
    assert driven.run(works) == [2] and len(pending) < 19
    driven.check(works, given)


def test_slots_start_without_memory_for_a_batch(monkeypatch):
    """They read smaller batches; without memory for one prompt they do not start."""
    compiling, most = Slots.compile_further_programs, 2

    def compile_or_fail(slots, programs):
        if programs.batch > most:
            raise MemoryError("none left")
        return (yield from compiling(slots, programs))

    monkeypatch.setattr(Slots, "compile_further_programs", compile_or_fail)
    slots = runs.made(model(), POLICY, prefill_tokens=BATCH * BUCKET)
    left = [programs.batch for programs, error in slots.uncompiled.items() if error]
    assert left and set(left) == {BATCH}
    most = 0
    with pytest.raises(MemoryError, match="none left"):
        runs.made(model(), POLICY)


def test_slots_leave_memory_for_a_batch(monkeypatch):
    session = jaxkv.Session(model(), jaxkv.FullKV())
    limits = {"max_prompt": 64, "max_new_tokens": 16, "max_question": 0}
    one = Slots(session, count=1, start=False, **limits).needed
    monkeypatch.setattr(slot_memory.memory, "get_machine_bytes", lambda: 40 * one)
    counts = [
        slot_memory.count_fitting_slots(session, prefill_tokens=most, **limits)
        for most in (1, 128, 512)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[2] >= 5 * 0.8
    with pytest.raises(ValueError, match="prefill_tokens=0"):
        jaxkv.Engine(model(), prefill_tokens=0, max_new_tokens=8)


def test_extras_that_do_not_compile_fail_only_who_needs_them(monkeypatch):
    """The next request that needs them has them compiled anew."""
    options = {"slots": 2, "max_prompt_tokens": 32, "max_new_tokens": 6, "prefill_tokens": 1}
    compiling, fails = Slots._compile_extras, [RuntimeError("the compiler is out of memory")]

    def compile_or_fail(slots):
        if fails:
            raise fails.pop()
        compiling(slots)

    monkeypatch.setattr(Slots, "_compile_extras", compile_or_fail)
    strong = {
        "sampling": jaxkv.Sampling(temperature=0, repetition_penalty=1.5),
        "max_new_tokens": 6,
    }
    with jaxkv.Engine(model(), policy=POLICY, **options) as engine:
        wrong = engine.submit([5, 9, 2], **strong)
        with pytest.raises(RuntimeError, match="out of memory"):
            wrong.result(60)
        assert engine.submit([5, 9, 2], max_new_tokens=2).result(60).tokens.size
        found = engine.submit([5, 9, 2], **strong).result(60).tokens.tolist()
        assert found == jaxkv.generate(model(), [5, 9, 2], policy=POLICY, **strong).tokens.tolist()


def test_many_threads_ask_at_once():
    """Batches of 2 and 4 form as they may; each answer is that of the prompt alone."""
    limits = {"slots": BATCH, "max_prompt_tokens": 64, "max_new_tokens": runs.NEW}
    given, found = asked([33 + 3 * at for at in range(10)]), {}
    with jaxkv.Engine(model(), policy=POLICY, prefill_tokens=256, **limits) as engine:

        def ask(at):
            each = given[at]
            request = engine.submit(
                each.prompt,
                max_new_tokens=each.new,
                sampling=each.sampling,
                key=each.seed,
                stop_at_eos=False,
            )
            found[at] = request.result(300).tokens.tolist()

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[at] for at in range(10)] == [runs.alone(model(), POLICY, each) for each in given]
