"""Sequences in slots: each gets the tokens that it gets alone, those who is beside it, and nothing is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import slot_runs as runs
import test_again as again
import tiny
from policy_table import BY_NAME

import jaxkv
from jaxkv.engine.progress import run_generator
from jaxkv.engine.slot_shape import EXTRAS
from jaxkv.engine.slots import PARTS

BUDGET = 20


# From here on prompts are of one bucket; how several are compiled is a test of its own.
LONG = 33


def model():
    return tiny.tiny(tiny.TWO_LAYERS)


def of_one_length(model, policy):
    """Slots that have compiled the programs of prompts from `LONG` on."""
    slots = runs.made(model, policy, start=False)
    slots.compile_programs(lengths=False)
    return slots


@pytest.mark.parametrize("name", ["d2o", "omnikv", "streaming-rolling"])
def test_policies_answer_as_alone(name):
    """Requests over 4 slots; of D2O of two buckets, and below the budget."""
    policy = BY_NAME[name].policy(BUDGET)
    if name == "d2o":
        runs.check(model(), policy, runs.requests(1, 8))
        return
    given = runs.requests(1, 8, shortest=LONG)
    runs.check(model(), policy, given, slots=of_one_length(model(), policy))


def test_every_sampler_draws_as_alone():
    """Samplers mixed over the slots, a key each."""
    policy = BY_NAME["random"].policy(BUDGET)
    given = runs.requests(1, 10, sampled=True, shortest=LONG)
    runs.check(model(), policy, given, slots=of_one_length(model(), policy))


def test_a_policy_that_compresses_again_answers_as_alone():
    """Each sequence is compressed at steps of its own, in pools of the same size, and merged."""
    policy = again.POLICIES["adakv-merge"]
    given = runs.requests(2, 8, shortest=LONG)
    runs.check(model(), policy, given, slots=of_one_length(model(), policy))


def test_slots_on_a_mesh_answer_as_on_one_device():
    """Two groups of slots, kv heads over four devices."""
    whole, policy = meshes.model_of(4), meshes.roomy("d2o")
    split = whole.on(meshes.mesh_of(2, 4))
    slots = of_one_length(split, policy)
    runs.check(split, policy, runs.requests(4, 6, shortest=LONG), slots=slots, reference=whole)


def test_a_shared_budget_needs_no_number_of_rows():
    """Ratio budgets: each sequence keeps its own share."""
    policy = jaxkv.SnapKV(budget=0.5, window=4)
    given = runs.requests(5, 6, shortest=LONG)
    runs.check(model(), policy, given, slots=of_one_length(model(), policy))


def test_cancelled_and_paused_sequences_leave_the_others_alone():
    """One is released, one is taken out and goes on in another slot; all others, and it, get their tokens."""
    policy = jaxkv.SnapKV(budget=BUDGET, window=8, every=8)
    given = [
        dataclasses.replace(each, new=runs.NEW, eos=())
        for each in runs.requests(6, 4, sampled=True, shortest=LONG)
    ]
    slots = of_one_length(model(), policy)
    for slot, asked in enumerate(given):
        slots.insert_sequence(runs.begun(slots, asked), slot)
    first = slots.decode(5)
    slots.release_slots([1])
    paused = slots.copy_sequence(2)
    slots.release_slots([2])
    second = slots.decode(7)
    assert (second[[1, 2]] == -1).all()
    slots.insert_sequence(paused, 1)
    parts = [slots.decode(7) for _ in range(6)]
    rest = np.concatenate([second, *parts], axis=1)
    for slot, at in ((0, 0), (1, 2), (3, 3)):
        tokens = np.concatenate([first[at], rest[slot]])
        assert tokens[tokens >= 0].tolist() == runs.alone(model(), policy, given[at])
    assert slots.done.all()


def test_questions_on_one_document():
    """A prompt is read once; sequences with questions on top of it get the tokens of `Session.extend`."""
    policy = jaxkv.SnapKV(budget=24, window=8, every=8)
    session = jaxkv.Session(model(), policy, key=0)
    prompt, questions = tiny.prompts(7, [50])[0], tiny.prompts(8, [5, 9, 16])
    slots = runs.made(model(), policy, max_question=16)
    document, clock = slots.prefill(prompt), runs.StageClock()
    with clock:
        for slot, question in enumerate(questions):
            slots.insert_sequence(
                slots.begin_sequence(slots.extend(document, question), max_new_tokens=12), slot
            )
        tokens = slots.decode(12)
    assert clock.programs == 0
    for slot, question in enumerate(questions):
        cache = session.extend(session.prefill(prompt), question, new=12)
        assert session.sample(cache, 12)[1][0].tolist() == tokens[slot].tolist()


def test_a_second_question_needs_room_of_its_own():
    """Rows that do not fit would are in the next segment: rejected, under policies that only append."""
    slots = runs.made(model(), jaxkv.FullKV(), max_question=16)
    cache, question = slots.prefill(tiny.prompts(7, [60])[0]), tiny.prompts(8, [16])[0]
    with pytest.raises(ValueError, match="run one question on top of a prompt"):
        for _ in range(20):
            cache = slots.extend(cache, question)
    with pytest.raises(ValueError, match="give a question for each"):
        slots.extend(slots.prefill(tiny.prompts(7, [60])[0]), [question, question])


def test_a_length_is_compiled_once_it_is_asked_for():
    """Slots that start with one length: `compiling` another one leaves nothing for its prompts to compile."""
    policy = jaxkv.SnapKV(budget=11, window=4)
    slots = runs.made(
        tiny.tiny(tiny.TWO_LAYERS), policy, start=False, max_prompt=120, max_question=16
    )
    parts = []
    slots.compile_programs(parts.append, lengths=False)
    assert len(parts) == PARTS
    assert [(each.kind, each.length) for each in slots.uncompiled] == [
        ("prompt", 32),
        ("prompt", 128),
        ("prompt", 16),
        ("question", 64),
        ("extras", 0),
    ]
    for programs in list(slots.uncompiled)[:-1]:
        run_generator(slots.compile_further_programs(programs))
    assert list(slots.uncompiled) == [EXTRAS]
    given = runs.requests(3, 6)
    assert runs.answered(slots, given)[1] == 0


def test_what_a_slot_held_before_is_gone():
    """A short sequence behind a long one; and `take` gives back, bit by bit, what was inserted."""
    policy = jaxkv.AdaKV(base=jaxkv.SnapKV(budget=BUDGET, window=8))
    slots, (short, long) = runs.made(model(), policy), tiny.prompts(9, [17, 64])
    for prompt in (long, short):
        one = slots.begin_sequence(slots.prefill(prompt), max_new_tokens=4)
        slots.insert_sequence(one, 3)
        back = slots.copy_sequence(3)
        for put, got in zip(jax.tree.leaves(one.arrays), jax.tree.leaves(back.arrays), strict=True):
            if jnp.issubdtype(put.dtype, jax.dtypes.prng_key):
                put, got = jax.random.key_data(put), jax.random.key_data(got)
            np.testing.assert_array_equal(np.asarray(put), np.asarray(got))


def test_what_slots_refuse(as_users_call):
    slots = runs.made(model(), jaxkv.SnapKV(budget=BUDGET, window=8))
    cache, other = (
        slots.prefill(tiny.prompts(0, [20])[0]),
        slots.session.prefill(tiny.prompts(0, [20])),
    )
    for call, named in (
        (lambda: slots.prefill([1] * 65), "max_prompt=64"),
        (lambda: slots.extend(cache, [1]), "max_question=0"),
        (lambda: slots.begin_sequence(cache, max_new_tokens=25), "max_new_tokens=25"),
        (lambda: slots.begin_sequence(cache, max_new_tokens=2, eos=range(9)), "more than 8"),
        (lambda: slots.insert_sequence(slots.begin_sequence(cache, max_new_tokens=2), 4), "slot=4"),
        (lambda: slots.release_slots([0, -1]), "slot=-1"),
        (lambda: slots.begin_sequence(other, max_new_tokens=2), "cache="),
        (lambda: slots.decode(2, until="some"), "until='some'"),
        (lambda: runs.made(model(), None, count=0), "count=0"),
        (lambda: runs.made(model(), None, max_prompt=500), "made for 512"),
        (
            lambda: runs.made(model(), jaxkv.OmniKV(filter_layers=(0,), adjacent=0, offload=True)),
            "host memory",
        ),
        (
            lambda: runs.made(
                model(), jaxkv.OmniKV(filter_layers=(0,), adjacent=0, prefill_ratio=2)
            ),
            "chunked prefill",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    on_mesh = meshes.model_of(4).on(meshes.mesh_of(2, 4))
    with pytest.raises(ValueError, match="not divisible by the mesh's 2 groups"):
        runs.made(on_mesh, None, count=3)
