"""A process' peak memory, against what was measured."""

import pytest

import jaxkv
from jaxkv.planning.catalog import model_named
from jaxkv.planning.process import process_of
from jaxkv.planning.setting import Request

CONFIG = model_named("smollm2-135m").config


def predicted(policy: str, batch: int, context: int, dtype: str):
    made = getattr(jaxkv, policy)(**({} if policy == "FullKV" else {"budget": 256}))
    given = {"batch": batch, "context": context, "new": 32, "dtype": dtype}
    return process_of(Request(model="smollm2-135m", config=CONFIG, policy=made, **given))


@pytest.mark.parametrize(
    ("policy", "batch", "context", "dtype", "peak"),
    [
        ("FullKV", 1, 4096, "float32", 1241657344),
        ("D2O", 1, 4096, "float32", 1430806528),
        ("SnapKV", 1, 4096, "bfloat16", 850386944),
        ("AdaKV", 4, 1024, "bfloat16", 861007872),
    ],
)
def test_what_was_measured(policy, batch, context, dtype, peak):
    """Resident peaks of processes on Linux, an AMD EPYC, at 2c6299e."""
    found = predicted(policy, batch, context, dtype)
    assert found.peak == pytest.approx(peak, rel=0.15) and found.peak < found.first_peak
    # SmolLM2 has 134,515,008 parameters.
    assert found.weights == 134_515_008 * (4 if dtype == "float32" else 2)


def test_what_makes_it_more():
    small = predicted("FullKV", 1, 512, "float32")
    for more in (("FullKV", 2, 512), ("FullKV", 1, 2048), ("D2O", 1, 512)):
        assert predicted(*more, "float32").peak > small.peak
    away = jaxkv.OmniKV(budget=64, filter_layers=(2, 8, 18), offload=True)
    # Rows that wait do so in the same memory.
    found = process_of(
        Request(model="smollm2-135m", config=CONFIG, policy=away, context=8192, dtype="float32")
    )
    assert (
        found.waiting > 2 * found.cache
        and found.peak > predicted("FullKV", 1, 8192, "float32").peak - 10**8
    )
