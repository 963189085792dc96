"""Slots of models with sliding-window layers: rows that leave a window are dropped, and nothing is compiled for it."""

import dataclasses
from unittest import mock

import meshes
import numpy as np
import pytest
import tiny
from test_windows import POLICIES, SHAPE, WINDOW, prompts

import jaxkv
from jaxkv.engine import headroom
from jaxkv.engine.slot_shape import compute_slot_shape
from jaxkv.engine.slots import Slots
from jaxkv.machine.compilation import StageClock

# Prompts of one bucket.
LENGTHS, ANSWERS, QUESTION = (30, 17, 21), (30, 12, 24), [9, 8, 7, 6, 5]
LIMITS = {"max_prompt": 32, "max_new_tokens": 30, "max_question": 5, "size": 7}


def alone(model, policy, ids, new, asked):
    """Tokens of one prompt by a `Session`, after the question if it is asked."""
    session = jaxkv.Session(model, policy)
    cache = session.prefill(ids, new=30)
    cache = session.extend(cache, QUESTION, new=30) if asked else cache
    return session.sample(cache, new, new=30)[1][0].tolist()


def texts():
    return prompts(lengths=LENGTHS)


def answered(slots, asked):
    """Tokens of the prompts in three slots, one of them after a question; the first is moved on the way."""
    for slot, (ids, new) in enumerate(zip(texts(), ANSWERS, strict=True)):
        cache = slots.prefill(ids)
        cache = slots.extend(cache, QUESTION) if slot == asked else cache
        slots.insert_sequence(slots.begin_sequence(cache, max_new_tokens=new), slot)
    first = slots.decode(11)
    moved = slots.copy_sequence(0)
    slots.release_slots([0])
    slots.insert_sequence(moved, 0)
    found = np.concatenate([first, slots.decode(64)], axis=1)
    return [row[row >= 0].tolist() for row in found]


@pytest.mark.parametrize("name", ["every, ada", "h2o"])
def test_answers_three_windows_long_are_as_alone(name):
    model, policy = tiny.tiny(SHAPE), POLICIES[name](24)
    with mock.patch.object(headroom, "_LEAST_BEYOND", 8):
        slots, clock = Slots(jaxkv.Session(model, policy), count=3, **LIMITS), StageClock()
        # For each of two kv heads: the window, as many again in a bucket, and a question's if prompts are compressed.
        assert slots.shape.rows[0] == 2 * (WINDOW + 32)
        with clock:
            found = answered(slots, 1)
        assert not clock.programs
    for slot, (ids, new) in enumerate(zip(texts(), ANSWERS, strict=True)):
        assert found[slot] == alone(model, policy, ids, new, slot == 1), slot


def test_meshes():
    """Slots of 2 x 2 devices hold two groups and a kv head a device."""
    model, policy = tiny.tiny(SHAPE), POLICIES["adakv"](24)
    with mock.patch.object(headroom, "_LEAST_BEYOND", 8):
        session = jaxkv.Session(model.on(meshes.mesh_of(2, 2)), policy)
        slots = Slots(session, count=4, **LIMITS | {"max_question": 0})
        found = answered(slots, None)
    for slot, (ids, new) in enumerate(zip(texts(), ANSWERS, strict=True)):
        assert found[slot] == alone(model, policy, ids, new, False), slot


def test_a_slot_holds_a_window_and_as_many_rows_again():
    """Of answers of 2,048 tokens a window's layer holds 8 + 256 rows a head, not 8 + 2,048."""
    with mock.patch.object(headroom, "_LEAST_BEYOND", 8):
        short = compute_slot_shape(
            POLICIES["full"](24).build_policy_parts(), SHAPE, prompt=32, question=5, new=30
        )
    assert short.rows[0] == 2 * (WINDOW + 16)
    config = dataclasses.replace(SHAPE, max_positions=4096)
    rows = compute_slot_shape(
        POLICIES["snapkv"](24).build_policy_parts(), config, prompt=64, question=0, new=2048
    ).rows
    assert rows[0] // 2 == WINDOW + 256 and rows[1] // 2 >= 24 + 2048
    shared = jaxkv.GlobalBudget(base=POLICIES["snapkv"](24)).build_policy_parts()
    assert (
        compute_slot_shape(shared, config, prompt=64, question=0, new=2048).rows[0] >= 2 * 2 * 2048
    )
