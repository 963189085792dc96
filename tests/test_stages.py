"""The arithmetic by which plans are answered at once, held to the prefill that it stands for, run on shapes."""

import dataclasses

import pytest
import tiny

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.engine.prefill_bytes import PrefillBytes
from jaxkv.planning.programs import SMALL, Work, abstract_model, call_name
from jaxkv.sharding.record import Call, weigh

SHAPE = dataclasses.replace(tiny.shape(layers=4, kv_heads=2, group=4, dim=64), max_positions=4096)
TOKENS, BUDGET = 2000, 200
SNAP = jaxkv.SnapKV(budget=BUDGET)
CASES = {
    "full": (jaxkv.FullKV(), 2),
    "pyramidkv": (jaxkv.PyramidKV(budget=BUDGET), 2),
    "adakv": (jaxkv.AdaKV(budget=BUDGET), 1),
    "h2o": (jaxkv.H2O(budget=BUDGET), 2),
    "d2o": (jaxkv.D2O(budget=BUDGET), 3),
    "global": (jaxkv.GlobalBudget(base=SNAP), 2),
    "cake": (jaxkv.CAKE(budget=BUDGET), 2),
    "criticalkv": (jaxkv.CriticalKV(base=SNAP), 2),
}


def arithmetic(work: Work, monkeypatch) -> PrefillBytes:
    """The arithmetic of a prefill's plan on a GPU."""
    asked, real = list[PrefillBytes](), PrefillBytes.stages
    with monkeypatch.context() as patched:
        patched.setattr(PrefillBytes, "stages", lambda self: asked.append(self) or real(self))
        assert (
            dataclasses.replace(work, implementation=Implementation.PALLAS).planned.peak_bytes > 0
        )
    return asked[0]


def of_arrays(stage: str, work: PrefillBytes) -> int:
    """Bytes of a stage without those that its program needs beside arrays."""
    group, row = work.config.group, work._rows_of(1)
    needs = {
        "layer": work._layer(False),
        "top layer": work._layer(True),
        "choose": work._choosing(),
        "thin": 16 * work.config.layers * row,
        "pack": 0 if work.buffer is None else 4 * work.config.layers * row,
        # Copies in float32; what each query of a group makes of a row.
        "merge": 8 * work.config.head_dim * row,
        "score": 4 * group * row,
    }
    return work.stages()[stage] - needs.get(stage.rpartition(", ")[2], 0)


def lying(call: Call, name: str, weights: int) -> int:
    """Bytes that lie there while a program runs, weights left out; what it writes in place counts once."""
    in_place = call.name in ("pack_shared", "thinned", "pack_chosen")
    twice = weigh(call.results.x) if name == "layer" else weigh(call.results) if in_place else 0
    return call.beside - weights + weigh(call.arguments) + weigh(call.results) - twice


@pytest.mark.parametrize("name", CASES)
def test_the_arithmetic_of_a_prefill(name, as_users_call, monkeypatch):
    policy, batch = CASES[name]
    flat = abstract_model(SHAPE, "bfloat16")
    work = Work(
        flat=flat,
        policy=policy,
        batch=batch,
        tokens=TOKENS,
        new=8,
        implementation=Implementation.XLA,
    )
    weights, found, stage, layers = weigh((flat.ends, flat.blocks)), dict[str, int](), "", 0
    for call in work.prefill.calls:
        does = call_name(call)
        if does in ("layer", "top layer"):
            layers, stage = layers + 1, does
        at = does if does in (stage, "logits") else f"{stage}, {does}"
        # The arithmetic looks at the upper two layers; the programs that pack a shared pool follow the top one.
        if layers >= SHAPE.layers - 1 and call.name not in SMALL:
            found[at] = max(found.get(at, 0), lying(call, does, weights))
    asked = arithmetic(work, monkeypatch)
    assert set(asked.stages()) == set(found)
    for at, more in found.items():
        assert of_arrays(at, asked) == pytest.approx(more, rel=0.025), at
