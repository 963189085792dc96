"""`jaxkv.Engine`: requests from many threads get what they get alone; cancelling, deadlines, faults, documents."""

import asyncio
import concurrent.futures
import dataclasses
import time
from typing import ClassVar

import engine_runs
import jax
import lettered
import meshes
import pytest
import slot_runs as runs
import tiny
from engine_runs import held, under_way
from lettered import DOC, ids
from policy_table import BY_NAME, REPEATED
from test_stores import Half

import jaxkv
from jaxkv.cache.stores import DenseStore
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.sampling import Sampling
from jaxkv.loading import LanguageModel
from jaxkv.machine.compilation import StageClock
from jaxkv.policies import PolicyWrapper
from jaxkv.policies.wrapper import replace_policy_budget
from jaxkv.serving.compiling import COMPUTING
from jaxkv.serving.document_store import DocumentCacheStore
from jaxkv.serving.requests import mark_future_running
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.work import RequestWork
from jaxkv.text.prompts import encode_prompts

# It does not go by the end of a document, of which `prefill` would warn.
POLICY = jaxkv.KNorm(budget=16)
ALONE = BY_NAME["snapkv"].policy(20)
LIMITS = {"slots": 3, "max_prompt_tokens": 64, "max_new_tokens": runs.NEW}
ONE = {"slots": 1, "max_prompt_tokens": 64, "max_question_tokens": 16, "max_new_tokens": 8}


def model():
    return tiny.tiny(tiny.TWO_LAYERS)


@pytest.fixture(scope="module")
def letters():
    """An engine whose model speaks characters, with room for questions."""
    options = ONE | {"slots": 2, "max_new_tokens": 40, "queue": 4}
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **options) as engine:
        yield engine


class Busy:
    """An engine that computes all the while."""


def test_lengths_are_compiled_for_requests_that_have_them():
    """Beside an engine that computes, only lengths that are asked for are compiled; others once none computes."""
    busy, limits = Busy(), LIMITS | {"max_prompt_tokens": 70, "max_question_tokens": 100}
    COMPUTING.add(busy)
    given = [dataclasses.replace(asked, eos=()) for asked in runs.requests(9, 3)]
    with jaxkv.Engine(model(), policy=POLICY, precompile=False, **limits) as engine:
        requests = [
            engine.submit(asked.prompt, max_new_tokens=asked.new, key=asked.seed) for asked in given
        ]
        document = engine.document(given[0].prompt)
        asked = engine.submit([5, 9, 2], document=document, max_new_tokens=6, stop_at_eos=False)
        for each, request in zip(given, requests, strict=True):
            assert request.result().tokens.tolist() == runs.alone(model(), POLICY, each)
        assert asked.result().tokens.tolist() == on_document(model(), given[0].prompt, POLICY)
        left = {(each.kind, each.length) for each in engine._slots.uncompiled if each.batch == 1}
        assert ("question", 128) in left and ("question", 64) not in left
        assert not left & {("prompt", round_up_to_bucket(len(each.prompt))) for each in given}
        COMPUTING.discard(busy)
        deadline = time.monotonic() + 300
        while any(each.kind == "prompt" for each in list(engine._slots.uncompiled)):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def on_document(whole, prompt, policy):
    """What `generate` answers to a question of three tokens on a document."""
    cache = jaxkv.prefill(whole, prompt, policy=policy)
    options = {"cache": cache, "max_new_tokens": 6, "stop_at_eos": False}
    return jaxkv.generate(whole, [5, 9, 2], **options).tokens.tolist()


@pytest.mark.parametrize(
    "policy",
    [BY_NAME["h2o"].policy(20), jaxkv.Refit(base=jaxkv.KVGrad(budget=20, **REPEATED))],
    ids=["h2o", "refit-kvgrad"],
)
def test_requests_are_answered_as_alone(policy):
    """Prompts and questions on documents, greedy and sampled, of which some are cancelled; nothing is compiled."""
    told, programs = engine_runs.checked(policy, 16)
    assert told >= 12 and programs == 0


def test_groups_of_a_mesh_answer_as_alone():
    """Slots lie over two groups of four devices."""
    whole, policy = meshes.model_of(4), meshes.roomy("adakv")
    given = [dataclasses.replace(asked, eos=()) for asked in runs.requests(1, 5, shortest=33)]
    options = ONE | {"slots": 4, "max_question_tokens": 8, "max_new_tokens": runs.NEW}
    mesh = meshes.mesh_of(2, 4)
    with jaxkv.Engine(whole, policy=policy, mesh=mesh, document_bytes=1, **options) as engine:
        documents = [engine.document(asked.prompt) for asked in given[:2]]
        requests = [
            engine.submit(asked.prompt, max_new_tokens=asked.new, key=asked.seed) for asked in given
        ]
        for asked, request in zip(given, requests, strict=True):
            assert request.result().tokens.tolist() == runs.alone(whole, policy, asked)
        # Of two documents one waits on disk.
        ask = {"max_new_tokens": 6, "stop_at_eos": False}
        for document, asked in zip(documents, given, strict=False):
            found = engine.submit([5, 9, 2], document=document, **ask).result().tokens.tolist()
            assert found == on_document(whole, asked.prompt, policy)


def test_requests_have_budgets_of_their_own():
    policy = BY_NAME["adakv"].policy(20)
    prompts = [asked.prompt for asked in runs.requests(4, 2, shortest=33)]
    options = {"max_new_tokens": 12, "stop_at_eos": False}
    with jaxkv.Engine(model(), policy=policy, **LIMITS) as engine:
        requests = [
            engine.submit(prompt, budget=18 - 3 * at, **options)
            for at, prompt in enumerate(prompts)
        ]
        for at, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            own = replace_policy_budget(policy, 18 - 3 * at)
            alone = jaxkv.generate(model(), prompt, policy=own, **options)
            assert request.result().tokens.tolist() == alone.tokens.tolist()
            assert request.stats.kept == alone.stats.kept
        for wrong in (21, 0.5, 0):
            with pytest.raises(ValueError, match="budget="):
                engine.submit(prompts[0], budget=wrong)


def work_of(prompt, new, eos=(), *, offline=False):
    """A request as the scheduler takes it."""
    encoded = encode_prompts(prompt, None, model().config, close=True)
    given = dict.fromkeys(("key", "deadline", "text"))
    given |= {"policy": ALONE, "stops": (), "eos": eos, "offline": offline}
    return RequestWork(encoded=encoded, new=new, sampling=Sampling(temperature=0), **given)


@pytest.fixture
def scheduler(tmp_path):
    """A scheduler of one slot, stepped by hand."""
    slots = runs.made(model(), ALONE, count=1)
    return Scheduler(
        slots,
        DocumentCacheStore(
            model(), slots.session.policy, shape=slots.shape, most_bytes=0, folder=tmp_path
        ),
        ahead=3,
        prefixes=None,
    )


def test_requests_wait_compressed_with_their_first_token_told(scheduler):
    """While the first samples, the others are prefilled and their first token is sampled; one needs no slot at all."""
    given = [dataclasses.replace(asked, eos=()) for asked in runs.requests(7, 4)]
    tokens = [
        runs.alone(model(), scheduler.slots.session.policy, dataclasses.replace(asked, seed=0))
        for asked in given
    ]
    works = [work_of(asked.prompt, new) for asked, new in zip(given, (24, 6, 1, 5), strict=True)]
    ended = work_of(given[1].prompt, 6, eos=(tokens[1][0],))
    scheduler.waiting.extend([*works[:3], ended, works[3]])
    while scheduler.ready_count < 2:
        assert scheduler.run_scheduler_step()
    assert not works[0].request.done and works[2].request.done and ended.request.done
    assert works[1].answers.tokens == [tokens[1][:1]] and works[3].answers.tokens == [tokens[3][:1]]
    while scheduler.run_scheduler_step():
        pass
    assert scheduler.is_idle and scheduler.answered == 5
    for work, expected, new in zip(works, tokens, (24, 6, 1, 5), strict=True):
        found = work.request.result(0).tokens.tolist()
        # The same tokens, as far as both go.
        assert len(found) == new and found[: len(expected)] == expected[:new]
    assert (
        ended.request.result(0).finish_reason == "stop"
        and ended.request.result(0).tokens.tolist() == tokens[1][:1]
    )
    assert works[3].request.stats.first_token_seconds < works[0].request.stats.seconds


@pytest.mark.parametrize("offline", [False, True])
def test_tokens_are_drawn_between_the_layers_of_a_prompt(scheduler, offline):
    """A request goes on sampling while another prompt is prefilled; the prompt is first if nobody waits for tokens."""
    long, short = work_of(list(range(10)), 24, offline=offline), work_of(list(range(60)), 2)
    scheduler.waiting.append(long)
    while not long.answers.tokens[0]:
        scheduler.run_scheduler_step()
    scheduler.waiting.append(short)
    before = len(long.answers.tokens[0])
    # So that each layer is followed by a step of decoding, however fast this machine is.
    scheduler._step_seconds = 0.0
    while not short.answers.tokens[0]:
        scheduler.run_scheduler_step()
        scheduler._step_seconds = 0.0
    drawn = len(long.answers.tokens[0]) - before
    assert drawn == 0 if offline else drawn >= model().config.layers
    while scheduler.run_scheduler_step():
        pass
    assert len(long.request.result(0).tokens) == 24 and scheduler.longest_pause > 0


@pytest.mark.parametrize("stop", [(), ("zz", "k")])
def test_text_comes_in_pieces_and_ends_at_stop_strings(letters, stop):
    alone = jaxkv.generate(
        lettered.tiny(), DOC, policy=POLICY, max_new_tokens=40, stop=stop, stop_at_eos=False
    )
    request = letters.submit(DOC, max_new_tokens=40, stop=stop, stop_at_eos=False)
    pieces = list(request)
    assert "".join(pieces) == alone.text == request.result().text
    assert request.result().tokens.tolist() == alone.tokens.tolist()
    assert request.result().stop_reason == alone.stop_reason
    # Whoever comes later reads the same from the beginning.
    assert list(request) == pieces


def test_event_loops_read_requests(letters):
    async def read(seed):
        request = letters.submit(ids(seed, 12)[0], max_new_tokens=9, stop_at_eos=False)
        pieces = [piece async for piece in request]
        return "".join(pieces), await request

    async def main():
        return await asyncio.gather(*(read(seed) for seed in range(4)))

    for text, completion in asyncio.run(main()):
        assert text == completion.text and len(completion.tokens) == 9


def test_lists_are_mapped_in_order(letters):
    prompts = ids(4, *range(8, 14))
    options = {"max_new_tokens": 5, "stop_at_eos": False}
    mapped = lambda prompts, **more: [  # noqa: E731
        answer.text for answer in letters.map(prompts, **options, **more)
    ]
    ordered = mapped(iter(prompts))
    whole = jaxkv.generate(lettered.tiny(), prompts, policy=POLICY, **options)
    assert ordered == [each.text for each in whole]
    drawing = {"sampling": Sampling(temperature=1.0), "key": 7}
    assert mapped(prompts[:3], **drawing) == mapped(prompts[:3], **drawing) != ordered[:3]


def test_documents_hold_no_free_rows_until_they_are_asked(letters, monkeypatch):
    """Bytes beyond the kept rows are those of tables, whatever the length; no program is compiled for a length."""
    clock, step = StageClock(), letters._scheduler.run_scheduler_step

    def timed():
        with clock:
            return step()

    # Whatever the engine has not compiled yet for buckets of these lengths and for the question.
    for size in (5, 40):
        other = letters.document(DOC[:size])
        letters.submit("who?", document=other, max_new_tokens=2).result()
    with monkeypatch.context() as patched:
        patched.setattr(letters._scheduler, "run_scheduler_step", timed)
        documents = [
            letters.document(DOC[:size], budget=own) for size in (4, 11, 43) for own in (None, 3)
        ]
        # An entry has a position of four bytes as well.
        heads = letters.session.params.config.layers * letters.session.params.config.kv_heads
        rest = {each.nbytes - each.kept_nbytes - 4 * round(each.rows * heads) for each in documents}
        assert len(rest) == 1
        assert (
            max(each.nbytes for each in documents) < letters.stats.nbytes / letters.stats.slots / 2
        )
        assert letters.stats.document_bytes >= sum(each.nbytes for each in documents)
        for each in documents:
            letters.submit("who?", document=each, max_new_tokens=2).result()
    assert clock.programs == 0
    for each in documents:
        letters.documents.remove_document(each.id)


def test_documents_wait_on_disk_and_outlive_the_engine(tmp_path):
    """With bytes for one of them, three documents are asked in turns; the next engine finds them in the folder."""
    texts = [DOC, DOC[::-1], DOC.upper()]
    options = ONE | {"documents": tmp_path / "here", "document_bytes": 1}
    asked = lambda engine, documents: [  # noqa: E731
        engine.submit("who?", document=each).result().text for each in documents
    ]
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **options) as engine:
        documents = [engine.document(text) for text in texts]
        assert engine.stats.document_bytes == documents[-1].nbytes
        answers = asked(engine, documents)
        assert asked(engine, documents) == answers
    (tmp_path / "here" / "notes.json").write_text("{}")
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **options) as engine:
        assert engine.documents.get_documents() == sorted(documents, key=lambda each: each.id)
        assert asked(engine, documents) == answers
    other = jaxkv.Engine(lettered.tiny(), policy=jaxkv.KNorm(budget=17), start=False, **options)
    with other as engine:
        assert engine.documents.get_documents() == []


@dataclasses.dataclass(frozen=True)
class _Own(PolicyWrapper):
    """A user's policy, whose class is edited between two engines."""

    holds: ClassVar[type] = DenseStore

    def replace_base_parts(self, base):
        return dataclasses.replace(base, store=self.holds)


def test_a_document_of_another_store_is_refused_alone(tmp_path, monkeypatch):
    policy, options = _Own(base=POLICY), ONE | {"documents": tmp_path}
    with jaxkv.Engine(lettered.tiny(), policy=policy, **options) as engine:
        old = engine.document(DOC)
    monkeypatch.setattr(_Own, "holds", Half)
    with jaxkv.Engine(lettered.tiny(), policy=_Own(base=POLICY), **options) as engine:
        with pytest.raises(ValueError, match="another store than the slots' Half"):
            engine.submit("who?", document=old).result()
        assert engine.submit("who?", document=engine.document(DOC)).result().finish_reason


def test_a_full_disk_refuses_documents_and_loses_none(monkeypatch):
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **ONE, document_bytes=1) as engine:
        first = engine.document(DOC)
        answer = engine.submit("who?", document=first).result().text

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(engine.documents, "_write_document", full)
            with pytest.raises(OSError):
                engine.document(DOC.upper())
            assert (
                engine.documents.get_documents() == [first]
                and engine.stats.document_bytes == first.nbytes
            )
            assert engine.submit("who?", document=first).result().text == answer
        second = engine.document(DOC.upper())
        assert engine.submit("who?", document=second).result().finish_reason


def test_keys_that_slots_cannot_hold_are_refused_at_once(letters):
    with pytest.raises(ValueError, match="key="):
        letters.submit(DOC, key=jax.random.key(0, impl="rbg"))
    drawing, key = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 5}, jax.random.key(3)
    request = letters.submit(DOC, key=key, **drawing)
    key.delete()
    assert request.result().text == letters.submit(DOC, key=3, **drawing).result().text


def test_models_may_have_many_end_tokens():
    text = lettered.characters()
    text._ends = list(range(2, 14))
    many = LanguageModel(lettered.tiny().decoder, text=text, name="many")
    alone = jaxkv.generate(many, DOC, policy=POLICY, max_new_tokens=9)
    with jaxkv.Engine(many, policy=POLICY, **LIMITS) as engine:
        found = engine.submit(DOC, max_new_tokens=9).result()
    assert found.tokens.tolist() == alone.tokens.tolist()


def test_one_request_fails_alone(letters):
    """A sequence that is rejected on the way is nobody else's business."""
    short, long = ids(6, 9)[0], ids(6, 70)[0]
    before = letters.submit(short, max_new_tokens=30, stop_at_eos=False)
    with pytest.raises(ValueError, match="prompt="):
        letters.submit(long)
    document = letters.document(DOC)
    gone = letters.submit("why?", document=document)
    letters.documents.remove_document(document.id)
    after = letters.submit(short, max_new_tokens=30, stop_at_eos=False)
    assert before.result().text == after.result().text
    # Removed in time or not: an answer or a rejection, never a hang.
    error = gone.future.exception(timeout=60)
    assert error is None or "unknown document" in str(error)


def test_deadlines_cancellation_and_full_queues(letters):
    long = {"max_new_tokens": 40, "stop_at_eos": False}
    requests = [letters.submit(DOC, **long) for _ in range(4)]
    with pytest.raises(jaxkv.serving.QueueFull):
        for _ in range(200):
            requests.append(letters.submit(DOC, **long))
    assert letters.stats.rejected == 1
    for request in requests[:-1]:
        request.cancel()
    requests[-1].result()
    late = letters.submit(DOC, deadline=1e-6, **long)
    with pytest.raises(TimeoutError):
        late.result()
    before = len(letters.documents.get_documents())
    with pytest.raises(TimeoutError):
        letters.document(DOC, deadline=1e-6)
    assert len(letters.documents.get_documents()) == before
    cancelled = 0
    for request in requests[:-1]:
        # Those that had been answered before keep their answer.
        assert request.cancelled or request.result(60).finish_reason == "length"
        cancelled += request.cancelled
    # The four that waited cannot have been answered meanwhile.
    assert cancelled >= 3
    assert letters.submit(DOC, max_new_tokens=2).result().finish_reason == "length"


def test_cancelled_documents_leave_the_queue_and_the_device(letters):
    """One in mid-prefill and one that waits; the request behind them is answered, and nothing of them is left."""
    before = letters.documents.get_documents()
    with held(letters) as given_up:
        futures = [letters.submit_document(text) for text in (DOC, DOC[:9])]
        behind = letters.submit(DOC, max_new_tokens=2)
        under_way(letters, 2)
        assert [future.cancel() for future in reversed(futures)] == [True, True]
        assert given_up.wait(60)
        done, _ = concurrent.futures.wait(futures, timeout=60)
        assert done == set(futures) and all(future.cancelled() for future in futures)
        under_way(letters, 0)
    assert len(behind.result(60).tokens) == 2 and letters.documents.get_documents() == before
    kept = letters.submit_document(DOC)
    assert kept.result(60) in letters.documents.get_documents() and not kept.cancel()
    letters.documents.remove_document(kept.result().id)


def counted(monkeypatch, slots, name):
    """A list that grows by the prompt of each call of a function of the slots."""
    calls, called = [], getattr(slots, name)

    def counting(*args, **options):
        calls.append(args)
        return called(*args, **options)

    monkeypatch.setattr(slots, name, counting)
    return calls


def test_answers_to_one_prompt_share_its_prefill(letters, monkeypatch):
    """More of them than slots, beside another prompt; with and without a document. Each as alone with its key."""
    drawing = {"sampling": Sampling(temperature=1.0), "stop_at_eos": False}
    document = letters.document(DOC)
    for on, prompts, name in (
        (None, [DOC, DOC[:9]], "iterate_prefill"),
        (document, ["who?", "what is it"], "extend"),
    ):
        keys = [[jax.random.key(at) for at in range(3)], [3]]
        options = [{"max_new_tokens": new, "document": on, **drawing} for new in (12, 5)]
        given = list(zip(prompts, keys, options, strict=True))
        alone = [
            letters.submit(prompt, key=key, **each).result().tokens.tolist()
            for prompt, mine, each in given
            for key in mine
        ]
        assert len({tuple(tokens) for tokens in alone}) == 4
        with monkeypatch.context() as patched:
            prefilled = counted(patched, letters._slots, name)
            firsts = [letters.submit(prompt, key=mine, **each) for prompt, mine, each in given]
            requests = [request for first in firsts for request in (first, *first.others)]
            assert [request.result(60).tokens.tolist() for request in requests] == alone
        assert len(prefilled) == 2 and len(requests) == 4
    letters.documents.remove_document(document.id)


def test_policies_that_draw_prefill_for_each_key(monkeypatch):
    policy = BY_NAME["random"].policy(8)
    with jaxkv.Engine(lettered.tiny(), policy=policy, **LIMITS) as engine:
        prefilled = counted(monkeypatch, engine._slots, "iterate_prefill")
        first = engine.submit(DOC, key=[5, 6], max_new_tokens=9, stop_at_eos=False)
        for key, request in zip((5, 6), (first, *first.others), strict=True):
            alone = jaxkv.generate(
                lettered.tiny(), DOC, policy=policy, key=key, max_new_tokens=9, stop_at_eos=False
            )
            assert request.result().tokens.tolist() == alone.tokens.tolist()
    assert len(prefilled) == 2


def test_a_shared_prefill_goes_on_for_those_who_want_it(letters):
    """In mid-prefill the first of three is cancelled, then in another all are."""
    asked = {"key": [1, 2, 3], "sampling": Sampling(temperature=1.0), "max_new_tokens": 6}
    with held(letters) as given_up:
        first = letters.submit(DOC, stop_at_eos=False, **asked)
        under_way(letters, 0)
        first.cancel()
        late = letters.submit(DOC, key=[1, 2], deadline=1e-3, max_new_tokens=6)
        late.future.exception(60)
        assert not given_up.is_set()
    assert first.cancelled
    assert [len(request.result(60).tokens) for request in first.others] == [6, 6]
    for request in (late, *late.others):
        with pytest.raises(TimeoutError):
            request.result(60)
    with held(letters) as given_up:
        first = letters.submit(DOC, **asked)
        under_way(letters, 0)
        for request in (first, *first.others):
            request.cancel()
        assert given_up.wait(60)
    assert letters.submit(DOC, max_new_tokens=2).result(60).finish_reason == "length"


def test_several_answers_are_queued_together_or_not_at_all(letters):
    with pytest.raises(ValueError, match="key="):
        letters.submit(DOC, key=[0] * 5)
    with pytest.raises(ValueError, match="key="):
        letters.submit(DOC, key=[])
    with held(letters):
        requests = [letters.submit(DOC, max_new_tokens=2)]
        under_way(letters, 0)
        requests += [letters.submit(DOC, max_new_tokens=2) for _ in range(2)]
        with pytest.raises(jaxkv.serving.QueueFull):
            letters.submit(DOC, key=[0, 1, 2])
        assert letters.stats.waiting == 2
        first = letters.submit(DOC, key=[0, 1], max_new_tokens=2)
    assert all(request.result(60) for request in (*requests, first, *first.others))


def test_an_error_of_the_engine_ends_all_requests_with_its_message(monkeypatch):
    engine = jaxkv.Engine(lettered.tiny(), policy=POLICY, **LIMITS)

    def broken(*_, **__):
        raise RuntimeError("the device is gone")

    # Nothing works any more, releasing slots neither.
    for name in ("decode", "release_slots"):
        monkeypatch.setattr(engine._slots, name, broken)
    requests = [engine.submit(DOC, max_new_tokens=4) for _ in range(5)]
    for request in requests:
        with pytest.raises(RuntimeError, match="the device is gone"):
            request.result(timeout=60)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.submit(DOC)
    engine.close()


def test_what_has_ended_is_not_begun_again():
    ended, cancelled, waiting = (concurrent.futures.Future() for _ in range(3))
    ended.set_result(1)
    cancelled.cancel()
    assert mark_future_running(waiting)
    for future in (ended, cancelled, cancelled):
        assert not mark_future_running(future)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_answers_or_cancels(drain):
    engine = jaxkv.Engine(lettered.tiny(), policy=POLICY, **LIMITS)
    requests = [engine.submit(DOC, max_new_tokens=24, stop_at_eos=False) for _ in range(9)]
    engine.close(drain=drain)
    if drain:
        assert [len(request.result(timeout=0).tokens) for request in requests] == [24] * 9
    else:
        ended = [request.future.exception(timeout=0) for request in requests]
        assert any(isinstance(error, concurrent.futures.CancelledError) for error in ended)
    with pytest.raises(RuntimeError):
        engine.submit(DOC)
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 0},
        {"queue": 0},
        {"max_prompt_tokens": 10**6},
        {"policy": jaxkv.OmniKV(filter_layers=(0,), offload=True)},
    ],
)
def test_engines_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="="):
        jaxkv.Engine(lettered.tiny(), **ONE | options)
