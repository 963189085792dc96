"""Slots of models with window layers: rows that leave a window are dropped, and nothing is compiled for it."""

import dataclasses
from unittest import mock

import meshes
import numpy as np
import pytest
import tiny
from test_windows import KINDS, POLICIES, SHAPE, WINDOW, prompts

import jaxkv
from jaxkv.engine import growth
from jaxkv.engine.slot_shape import slot_shape
from jaxkv.engine.slots import Slots
from jaxkv.machine.compilation import Clock

TWO = dataclasses.replace(SHAPE, layers=2, kinds=KINDS[1:])
ANSWERS, QUESTION = (30, 12, 24), [9, 8, 7, 6, 5]
LIMITS = {"max_prompt": 64, "max_new_tokens": 30, "max_question": 5, "size": 7}


def alone(model, policy, ids, new, asked):
    """Tokens of one prompt by a `Session`, after the question if it is asked."""
    session = jaxkv.Session(model, policy)
    cache = session.prefill(ids)
    cache = session.extend(cache, QUESTION) if asked else cache
    return session.draw(cache, new)[1][0].tolist()


def answered(slots):
    """Tokens of the prompts in three slots, the second after a question; the first is moved on the way."""
    for slot, (ids, new) in enumerate(zip(prompts(), ANSWERS, strict=True)):
        cache = slots.prefill(ids)
        cache = slots.extend(cache, QUESTION) if slot == 1 else cache
        slots.insert(slots.begin(cache, max_new_tokens=new), slot)
    first = slots.decode(11)
    moved = slots.take(0)
    slots.release([0])
    slots.insert(moved, 0)
    found = np.concatenate([first, slots.decode(64)], axis=1)
    return [row[row >= 0].tolist() for row in found]


@pytest.mark.parametrize("name", ["full", "h2o", "every, ada"])
def test_answers_three_windows_long_are_as_alone(name):
    model, policy = tiny.tiny(TWO), POLICIES[name](24)
    with mock.patch.object(growth, "_LEAST_BEYOND", 8):
        slots, clock = Slots(jaxkv.Session(model, policy), count=3, **LIMITS), Clock()
        # For each of two kv heads: the window, as many again in a bucket, and a question's if prompts are compressed.
        assert slots.shape.rows[0] == 2 * (WINDOW + (16 if name == "full" else 32))
        with clock:
            found = answered(slots)
        assert not clock.programs
    for slot, (ids, new) in enumerate(zip(prompts(), ANSWERS, strict=True)):
        assert found[slot] == alone(model, policy, ids, new, slot == 1), slot


def test_meshes():
    """Slots of 2 x 2 devices hold two groups and a kv head a device."""
    with mock.patch.object(growth, "_LEAST_BEYOND", 8):
        model = tiny.tiny(TWO)
        mesh = Slots(
            jaxkv.Session(model.on(meshes.mesh_of(2, 2)), POLICIES["adakv"](24)), count=4, **LIMITS
        )
        assert answered(mesh)[:3] == [
            alone(model, POLICIES["adakv"](24), ids, new, slot == 1)
            for slot, (ids, new) in enumerate(zip(prompts(), ANSWERS, strict=True))
        ]


def test_a_slot_holds_a_window_and_as_many_rows_again():
    """Of answers of 2,048 tokens: three layers of five hold 8 + 256 rows a head where they held 8 + 2,048."""
    config = dataclasses.replace(SHAPE, max_positions=4096)
    rows = slot_shape(POLICIES["snapkv"](24).parts(), config, prompt=64, question=0, new=2048).rows
    assert [each // 2 for each in rows[:2]] == [WINDOW + 256] * 2 and rows[2] // 2 >= 24 + 2048
    shared = jaxkv.GlobalBudget(base=POLICIES["snapkv"](24)).parts()
    assert slot_shape(shared, config, prompt=64, question=0, new=2048).rows[0] >= 2 * 5 * 2048
