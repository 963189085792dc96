"""The bound of a prefill's memory, held to the programs that XLA compiles for it on this machine."""

import dataclasses

import pytest
import tiny

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.planning.traced_programs import TraceInputs, build_abstract_model, select_largest_calls
from jaxkv.planning.worker import compile_traced_program
from jaxkv.sharding.record import count_device_bytes

SHAPE = dataclasses.replace(tiny.shape(layers=6, kv_heads=2, group=4, dim=64), max_positions=4096)
POLICIES = (jaxkv.FullKV(), jaxkv.AdaKV(budget=200), jaxkv.D2O(budget=200))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_peak_of_a_prefill(policy, as_users_call):
    """Within a tenth of what is alive while the upper layers run, temporaries of their programs included."""
    flat = build_abstract_model(SHAPE, "float32")
    asked = {"batch": 2, "tokens": 2000, "new": 8, "implementation": Implementation.XLA}
    work = TraceInputs(flat=flat, policy=policy, **asked)
    weights = count_device_bytes((flat.ends, flat.blocks))
    peaks = [
        compile_traced_program(call.name, call.traced, platform="cpu", beside=call.beside)[
            0
        ].peak_bytes
        for call in select_largest_calls(work)
        if call.name in ("layer", "top layer")
    ]
    assert len(peaks) == 2
    assert work.prefill_plan.peak_bytes == pytest.approx(max(peaks) - weights, rel=0.1)
