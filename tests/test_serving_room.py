"""`slots="auto"`: how many slots of an engine fit into the free memory, beside the prompts that wait."""

import lettered
import meshes
import pytest

import jaxkv
from jaxkv.arguments import validate_model
from jaxkv.engine.slots import Slots
from jaxkv.machine import memory
from jaxkv.serving import slot_memory

LIMITS = {"max_prompt": 64, "max_new_tokens": 16, "max_question": 0}


def allocated(session, count):
    """Bytes of so many slots."""
    slots = Slots(session, count=count, start=False, **LIMITS)
    slots.compile_programs(lengths=False)
    return slots.nbytes


def test_slots_from_memory(monkeypatch):
    session = jaxkv.Session(lettered.tiny(), jaxkv.KNorm(budget=16))
    assert slot_memory.count_fitting_slots(session, **LIMITS) == 64
    one = allocated(session, 1)
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: 20 * one)
    count = slot_memory.count_fitting_slots(session, **LIMITS)
    assert 3 <= count <= 16
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: one // 2)
    with pytest.raises(MemoryError, match="one slot, its queue and a prefill needs"):
        slot_memory.count_fitting_slots(session, **LIMITS)


def test_slots_from_memory_on_a_mesh(monkeypatch):
    """As many as fit with the prompts that wait, each of which takes a slot in both groups; not half as many."""
    session = jaxkv.Session(
        validate_model(meshes.model_of(4), meshes.mesh_of(2, 2)), jaxkv.KNorm(budget=16)
    )
    pair = allocated(session, 2)
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: 40 * pair)
    count = slot_memory.count_fitting_slots(session, **LIMITS)
    # Every array of the slots has one part for each of them.
    held = (count // 2 + slot_memory.get_max_prefills_ahead(count)) * pair
    assert count % 2 == 0 and 0.45 < held / (40 * pair) < 0.9
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: pair // 2)
    with pytest.raises(MemoryError, match="one slot, its queue and a prefill needs"):
        slot_memory.count_fitting_slots(session, **LIMITS)
