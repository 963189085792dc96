"""The model of TPU times: cycles and loops of a compiled program's text, and the arithmetic of kernels."""

import importlib
import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TEXT = """HloModule jit__loop, entry_computation_layout={(s32[])->s32[]}

%cond.1 (arg.1: (s32[])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(16)
  %arg.1 = (s32[]{:T(128)}) parameter(0)
  ROOT %lt.1 = pred[] compare(%get-tuple-element.1, %constant.1), direction=LT
}

%body.1 (arg.2: (s32[])) -> (s32[]) {
  %fusion.1 = s32[] fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"100","other":1}
}

%outer.cond (arg.3: (s32[])) -> pred[] {
  %arg.3 = (s32[]{:T(128)}) parameter(0)
  ROOT %lt.2 = pred[] compare(%get-tuple-element.2, %get-tuple-element.3), direction=LT
}

%outer.body (arg.4: (s32[])) -> (s32[]) {
  %while.1 = (s32[]{:T(128)}) while(%tuple.1), condition=%cond.1, body=%body.1
  %fusion.2 = s32[] fusion(%y), kind=kLoop, backend_config={"estimated_cycles":"7"}
}

ENTRY %main.1 (x.1: s32[]) -> s32[] {
  %fusion.3 = s32[] fusion(%z), kind=kLoop, backend_config={"estimated_cycles":"1000"}
  %while.2 = (s32[]{:T(128)}) while(%tuple.2), condition=%outer.cond, body=%outer.body
}
"""


@pytest.fixture
def perf_tpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module("perf_tpu")


def test_cycles_of_loops(perf_tpu):
    """A loop takes its body's cycles times its trips, one that ends by an argument one; a step is the longest."""
    assert perf_tpu.cycles(TEXT) == 1000 + 16 * 100 + 7
    assert perf_tpu.step(TEXT) == (16 * 100 + 7, [16])
    first = "  %while.0 = (s32[]{:T(128)}) while(%tuple.3), condition=%outer.cond, body=%body.1\n"
    before = TEXT.replace("  %while.2", first + "  %while.2")
    assert perf_tpu.cycles(before) == perf_tpu.cycles(TEXT) + 100 and perf_tpu.step(before) == (
        16 * 100 + 7,
        [16],
    )
    walks = TEXT.replace("condition=%cond.1,", "condition=%outer.cond,")
    walks = walks.replace('"100"', '"100","dynamic_slice_sizes={128,64}"')
    assert perf_tpu.step(walks, 1025) == (9 * 100 + 7, [None]) and perf_tpu.step(walks) == (
        100 + 7,
        [None],
    )
    no_count = walks.replace("ROOT %lt.2 = pred[] compare", "ROOT %or.2 = pred[] or").replace(
        "3), direction=LT", "3)"
    )
    assert perf_tpu.step(no_count, 1025) == (100 + 7, [None])
    parts = perf_tpu.computations(TEXT)
    assert not perf_tpu.countable(TEXT) and perf_tpu.countable(
        TEXT.replace("%outer.cond,", "%cond.1,")
    )
    assert perf_tpu.trips(parts["cond.1"]) == 16 and perf_tpu.trips(parts["outer.cond"]) is None


def test_kernels_are_bound_by_rows_or_by_instructions(perf_tpu):
    long, short = (perf_tpu.decode_kernel(64, rows, 512) for rows in (65536, 16))
    assert long == pytest.approx(64 * 65536 * 512 / 1638e9)
    assert short == pytest.approx(64 * (340 + 250) / 1.75e9)
    coded = [perf_tpu.decode_kernel(64, rows, 260, coded=True) for rows in (1280, 33024)]
    assert coded == pytest.approx([64 * (410 + 250) / 1.75e9, 64 * (26 * 410 + 250) / 1.75e9])
    # 16 pairs of blocks of 1,024 queries, which see 1 to 16 blocks of 2,048 keys.
    block, program = perf_tpu.SPLASH_BUNDLES
    assert perf_tpu.splash(1, 32, 32768) == pytest.approx(
        32 * (272 * block + 32 * program) / perf_tpu.CLOCK
    )


def test_kernels_and_gathers_of_a_text(perf_tpu):
    """Kernels count by name; of gathers the rows of pools do, whose results have three axes."""
    text = """
  %tpu_decode.8 = (bf16[8,8,8,128]{3,2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %tpu_decode = (bf16[8,8,8,128]{3,2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call"
  %tpu_attend.1 = (bf16[8,8,8,128]{3,2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call"
  %custom-call.1 = s32[8] custom-call(%x), custom_call_target="Other"
  %gather.1 = bf16[8,16,128]{2,1,0} gather(%x, %y), offset_dims={2}
  %gather.2 = bf16[8,4096]{1,0} gather(%x, %y), offset_dims={1}
"""
    assert perf_tpu.kernels(text) == {"tpu_decode": 2, "tpu_attend": 1}
    assert perf_tpu.gathered(text) == 2 * 8 * 16 * 128


def test_spills_of_vectors(perf_tpu, tmp_path):
    """Of jaxkv's and JAX's kernels, by what libtpu dumps; scalars that spill do not count, dumps are deleted."""
    script = importlib.import_module("tpu_llo")
    bundles = """
  0x10   :  { %1 = sst [smem:[#allocation7_spill]] %s1  ;;  %2 = vst [vmem:[#allocation3]] %v1 }
  0x11 LB: >> { %3 = vst [vmem:[#allocation4_spill] sm:$0xff] %v2  ;;  %v3 = vld [vmem:[#allocation41_spill]] }
  0x12   : > { %4 = vst [vmem:[#allocation5_spill] sm:$0xff] %v2 }
"""
    for name in (
        "1-tpu_decode.1-72-final_bundles",
        "2-tpu_decode-72-final_bundles",
        "3-fusion.3-01-final_bundles",
    ):
        (tmp_path / f"{name}.txt").write_text(bundles)
    (tmp_path / "1-tpu_decode.1-71-schedule-analysis_final_bundles.txt").write_text(bundles)
    assert script.spills(tmp_path) == {"tpu_decode": 6} and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no bundles in what libtpu dumped"):
        script.spilled("nothing")


@pytest.mark.parametrize(
    "kept", sorted(RESULTS.glob("tpu_model*.json")), ids=lambda path: path.stem
)
def test_pages_are_what_the_script_writes(monkeypatch, perf_tpu, kept):
    """Each page is made of the rows that were kept beside it, all of them, and of nothing else."""
    for name in (
        "TPU_SKIP_MDS_QUERY",
        "ALLOW_MULTIPLE_LIBTPU_LOAD",
        "TF_CPP_MIN_LOG_LEVEL",
        "LIBTPU_INIT_ARGS",
    ):
        monkeypatch.setenv(name, "1")
    script, rows = importlib.import_module("aot_tpu"), json.loads(kept.read_text())
    assert script.report(rows) == kept.with_suffix(".md").read_text()
    assert set(rows) <= {
        f"{name}: {row}" for name, part in script.parts().items() for row in part.rows
    }
