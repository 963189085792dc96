"""The arithmetic of the performance model, on made-up SASS and thunks: a rule fires where it is broken, only there."""

import dataclasses
import importlib
import math
import re
from pathlib import Path

import pytest

SASS = """
ragged_decode:
.text.ragged_decode:
        /*0000*/                   LDG.E R4, desc[UR6][R2.64] ;
        /*0010*/                   IADD3 R5, R4, 0x1, RZ ;
        /*0020*/                   LDG.E R8, desc[UR6][R5.64] ;
        /*0030*/                   LDG.E R9, desc[UR6][R5.64+0x4] ;
.L_x_1:
        /*0040*/                   DEPBAR.LE SB0, 0x2 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   HMMA.16816.F32.BF16 R60, R52, R56, RZ ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R67], desc[UR6][R92.64], P4 ;
        /*0080*/                   LDGDEPBAR ;
        /*0090*/                   LDGSTS.E.BYPASS.128 [R67+0x800], desc[UR6][R90.64], P0 ;
        /*00a0*/                   LDGDEPBAR ;
        /*00b0*/                   WARPGROUP.HGMMA.64x64x16.F32 R24 ;
        /*00c0*/               @P2 BRA `(.L_x_1) ;
        /*00d0*/                   EXIT ;
.L_x_2:
        /*00e0*/                   BRA `(.L_x_2);
"""
THUNKS = """000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kWhile        [prev=001 (1) | sink]
condition:
        003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        004: kCustomKernel [sink] gemm_fusion_dot_4 grid: [1536, 1, 1] threads: [64, 1, 1] shared_memory: 768 bytes
        005: kCustomKernel [sink] ragged_decode__1 grid: [24, 2, 1] threads: [128, 1, 1]  shared_memory: 75776 bytes
        006: kWhile        [source | sink]
condition:
            007: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
          body:
            008: kCopy         [source | sink] kCopy
            009: kCopy         [source | sink] kCopy
        010: kCopy         [source | sink] kCopy
        013: kConditional  [source | sink]
          false_branch:
            012: kCustomKernel [sink] sort_6_1 grid: [8192, 1, 1] threads: [1024, 1, 1] shared_memory: 0 bytes
            014: kWhile        [source | sink]
condition:
                015: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
              body:
                016: kCopy         [source | sink] kCopy
    011: kCopy         [source | sink] kCopy
"""


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark that is run as a script."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module


def test_sass(script):
    sass = script("perf_sass")
    code = sass.kernel_of(SASS)
    body = code.body(code.hot)
    assert (len(code.operations), code.hot, len(body)) == (15, (4, 13), 9)
    assert (
        sum(map(sass.width, body)),
        sass.narrow(body),
        sass.left_in_flight(body),
        sass.groups(body),
    ) == (
        32,
        0,
        2,
        2,
    )
    # Two loads that need what the first one brought, and not one another.
    assert sass.rounds(code.operations[:4]) == 2
    assert (
        sass.narrow(
            sass.kernel_of(SASS.replace("BYPASS.128 [R67]", "BYPASS.64 [R67]")).operations[4:13]
        )
        == 1
    )
    assert sass.left_in_flight(body[1:]) == 0
    assert sass.kernel_of(re.sub("LDGSTS.*", "NOP ;", SASS)).hot is None
    assert sass.width("LDG.E.U16 R4, desc[UR6][R2.64]") == 2


def test_thunks(script):
    sass = script("perf_sass")
    sequence = sass.thunks(THUNKS)
    inside = sass.loop_launches(sequence)
    assert [each.name or each.kind for each in inside] == [
        *("gemm_fusion_dot_4", "ragged_decode__1", "compare", "kCopy", "kCopy", "kCopy")
    ]
    assert [each.product for each in inside] == [True, *(False,) * 5]
    row = inside[1]
    assert (row.ctas, row.threads, row.shared) == (48, 128, 75776)
    inner = sass.inner_loops(sequence)
    # What a sampler does that no greedy sequence asks for is no part of its token.
    assert len(inner) == 1 and len(sass.conditions(sequence)) == 1
    # A loop whose trips are known asks nothing.
    assert [sass.times(each, {inner[0].line: 7}) for each in inside] == [1, 1, 0, 7, 7, 1]
    assert [sass.times(each, {}) for each in inside] == [1] * 6
    assert sass.command_buffers(sequence) == (1, 0)
    outside = sass.thunks(THUNKS.replace("000: kCommandBuffer", "000: kSequential"))
    assert sass.command_buffers(outside) == (0, 6)


def stream(gpu, **changed):
    """A pass over rows as the kernels' is."""
    usual = {
        "resident": 3,
        "warps": 4,
        "bytes": 32768,
        "instructions": 375,
        "flight": 32768.0,
        "rounds": 2,
    }
    return gpu.Stream(**usual | changed)


def test_time_of_a_pass(script):
    gpu = script("perf_gpu")
    device = gpu.DEVICES["h200"]
    kernel, slots = stream(gpu), 3 * device.sms
    assert gpu.streamed(device, kernel, []) == 0
    # One program is bound by what it has in flight; a device full of them by copies.
    alone = gpu.streamed(device, kernel, [1e6])
    ends = 2 * gpu.L2_LATENCY + gpu.MEMORY_LATENCY + gpu.L2_LATENCY + 375 * 3 / device.clock
    assert alone == pytest.approx(ends + 1e6 * gpu.MEMORY_LATENCY / 32768)
    full = gpu.streamed(device, kernel, [1e6] * slots)
    assert full == pytest.approx(ends + 1e6 * slots / device.copy)
    # One program more than fit waits for a slot, and one of twice the rows is waited for.
    assert gpu.streamed(device, kernel, [1e6] * (slots + 1)) > full + alone * 0.9
    assert full < gpu.streamed(device, kernel, [1e6] * (slots - 1) + [2e6]) < full + alone
    assert gpu.streamed(device, stream(gpu, flight=2048.0), [1e6] * slots) > 2 * full
    assert gpu.streamed(device, kernel, [2e5] * 5 * slots) > full


def test_time_of_a_merge(script):
    gpu = script("perf_gpu")
    device = gpu.DEVICES["h200"]
    merge = gpu.Merge(resident=8, tiles=4, many=1, rounds=3, instructions=100, before=1)
    once = 3 * gpu.L2_LATENCY + 300 / device.clock
    assert gpu.merged(device, merge, [10, 20], 2048) == pytest.approx(
        2 * gpu.L2_LATENCY + 20 * once
    )
    many = dataclasses.replace(merge, many=64)
    assert gpu.merged(device, many, [10, 20], 2048) == pytest.approx(2 * gpu.L2_LATENCY + once)
    # More programs than fit take turns.
    slots = device.sms * 8
    assert gpu.merged(device, many, [1] * slots, 0) == pytest.approx(
        4 * gpu.merged(device, many, [1], 0)
    )
    assert gpu.merged(device, many, [1], 1e9) == pytest.approx(1e9 / gpu.L2_BANDWIDTH)


def test_resident(script):
    device = script("perf_gpu").DEVICES["h200"]
    assert device.resident(threads=128, registers=106, shared=71680) == 3
    assert device.resident(threads=128, registers=250, shared=1024) == 2
    assert device.resident(threads=1024, registers=16, shared=0) == 2


def test_lengths(script):
    decode = script("perf_decode")
    for case in decode.CASES:
        like = next((each for each in decode.CASES if each.name == case.like), case)
        assert case.rows == like.rows
    lengths = decode.skewed(1, 8, 1024)[0]
    assert max(lengths) / min(lengths) == pytest.approx(10, rel=0.01)


def test_chunks(script):
    """Whatever a checkout's way of cutting segments, all rows are read."""
    from jaxkv import pallas_kernels

    decode = script("perf_decode")
    lengths = decode.skewed(1, 4, 300)
    work, counts = decode.chunks_of(pallas_kernels, lengths, group=4, dim=128, pool_rows=2048)
    assert (sum(work), len(counts), sum(n > 0 for n in work)) == (1200, 4, sum(counts))


def found(script, text=SASS, spills=0):
    """The made-up kernel, launched."""
    decode, sass = script("perf_decode"), script("perf_sass")
    thunk = sass.Thunk(
        kind="kCustomKernel", name="ragged_decode", ctas=1024, threads=128, shared=71680
    )
    # As many loads as the kernels' loop has: 32 KiB.
    many = re.sub(r"(.*LDGSTS.*\n)", r"\1" * 8, text)
    return decode.Found(thunk=thunk, code=sass.kernel_of(many), registers=100, spills=spills)


def test_rules_of_kernels(script):
    decode, device = script("perf_decode"), script("perf_gpu").DEVICES["h200"]
    assert decode.stream_of(found(script), device).bytes == 32768
    assert decode.kernel_faults(found(script), device) == []
    bad = {
        "spills 8 bytes": {"spills": 8},
        "1 loads in the hot loop": {
            "text": SASS.replace("HMMA.16816.F32.BF16 R60, R52, R56, RZ", "LDG.E.64 R8, [R2]")
        },
        "0 KiB in flight": {"text": SASS.replace("SB0, 0x2", "SB0, 0x0")},
    }
    for said, changed in bad.items():
        wrong = decode.kernel_faults(found(script, **changed), device)
        assert len(wrong) == 1 and wrong[0].startswith(said), (said, wrong)
    # Of picked rows the numbers are loaded, asynchronously; what else is narrow, or more than that, is found.
    for load, numbers, many in (
        ("LDGSTS.E [R9]", 8, 0),
        ("LDGSTS.E [R9]", 7, 1),
        ("LDGSTS.E.64 [R9]", 8, 8),
    ):
        picked = found(
            script,
            SASS.replace("HMMA.16816.F32.BF16 R60, R52, R56, RZ", f"{load}, desc[UR12][R48.64]"),
        )
        assert decode.row_numbers(picked, 128) == 1
        wrong = decode.kernel_faults(picked, device, numbers)
        assert [int(each.split()[0]) for each in wrong] == [many] * bool(many)
    synchronous = found(
        script, SASS.replace("HMMA.16816.F32.BF16 R60, R52, R56, RZ", "LDG.E R8, [R2]")
    )
    assert decode.kernel_faults(synchronous, device, numbers=1)
    more = decode.stream_of(found(script), device, picked=True).rounds
    assert more == decode.stream_of(found(script), device).rounds + 1
    assert decode.prefill_faults(found(script)) == []
    for text in (SASS.replace("SB0, 0x2", "SB0, 0x0"), SASS.replace("HGMMA", "HMMA")):
        assert len(decode.prefill_faults(found(script, text))) == 1
    assert len(decode.prefill_faults(found(script, spills=8))) == 1


def estimate(script, **changed):
    """A case that breaks no rule."""
    decode = script("perf_decode")
    usual = {
        "rows": 126e-6,
        "merge": 2e-6,
        "launches": 2,
        "bytes": 537e6,
        "ctas": 392,
        "filled": True,
        "needed": 132,
    }
    usual |= {"flight": 98304.0, "resident": 3, "found": found(script)}
    return decode.Estimate(**usual | changed)


def test_rules_of_cases(script):
    decode, device = script("perf_decode"), script("perf_gpu").DEVICES["h200"]
    good = estimate(script)
    assert decode.faults(good, device, good) == []
    bad = {
        "100 programs work": {"ctas": 100},
        "the merge takes 11%": {"rows": 118e-6, "merge": 13e-6},
        "79% of the copy": {"rows": 153e-6},
        "6% slower than equal": {"rows": 134e-6},
    }
    for said, changed in bad.items():
        like = (
            dataclasses.replace(good, rows=changed["rows"])
            if "rows" in changed and "slower" not in said
            else good
        )
        wrong = decode.faults(
            estimate(script, **changed), device, like if "merge" not in changed else None
        )
        assert len(wrong) == 1 and wrong[0].startswith(said), (said, wrong)
    small = estimate(script, filled=False, bytes=4e6, rows=3e-6, merge=1.9e-6)
    assert decode.faults(small, device) == []


def step(script, layers=32, **changed):
    """A step that breaks no rule."""
    steps = script("perf_steps")
    setting = steps.Setting(changed.pop("policy", "FullKV"), changed.pop("batch", 8), 32768, layers)
    usual = {
        "launches": 20 + 12 * layers,
        "buffers": 1,
        "outside": 0,
        "inner": 0,
        "conditions": 0,
        "pools": 1000 * layers,
    }
    usual |= {
        "temporaries": 9 * layers,
        "copies": 0,
        "time": 1e-2,
        "attention": 1e-3,
        "ideal": 8e-3,
        "wrong": (),
    }
    return steps.Step(setting=setting, largest=9, largest_time=0.02, **usual | changed)


def test_rules_of_steps(script):
    steps = script("perf_steps")
    both = [step(script, 32), step(script, 4)]
    assert steps.faults(both) == []
    assert steps.per_layer(both) == 12
    assert steps.too_many("FullKV", 12.0) == [] and steps.too_many("FullKV", 12.1)
    bad = {
        "the loop's body is 2": {"buffers": 2},
        "the loop's body is 1 command buffers and 3": {"outside": 3},
        "copies a pool 1": {"copies": 1},
        "temporaries are 1.0%": {"temporaries": 320},
        "spills": {"wrong": ("spills",)},
    }
    for said, changed in bad.items():
        wrong = steps.faults([step(script, **changed)])
        assert len(wrong) == 1 and wrong[0].startswith(said), (said, wrong)
    # Of models cut short, those of all layers are told by how they grow.
    assert steps.faults([step(script, 8, temporaries=100), step(script, 4, temporaries=99)]) == []
    assert (
        len(steps.faults([step(script, 8, temporaries=84), step(script, 4, temporaries=42)])) == 1
    )
    assert steps.faults([step(script, batch=1, temporaries=10**6)]) == []


HLO = """HloModule jit__loop

%body.1 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]) parameter(0)
  %w = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %x = f32[4,8]{1,0} fusion(%w), kind=kLoop, calls=%f
  %y = f32[4,8]{1,0} fusion(%x, %w), kind=kLoop, calls=%g
  %k = bf16[2,64,128]{2,1,0} bitcast(%p)
  %gemm_fusion_dot.1 = f32[4,8]{1,0} fusion(%k, %y), kind=kCustom, calls=%h
  %call.1 = (f32[1,4]{1,0}) custom-call(%y, %k), custom_call_target="__gpu$xla.gpu.triton", \
operand_layout_constraints={f32[4,8]{1,0}, bf16[2,64,128]{2,1,0}}, metadata={op_name="a/ragged_decode/b"}, \
backend_config={x, name = "ragged_decode", y}
  %loop.1 = (s32[]) while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %t = (s32[], f32[4,8]) tuple(%x, %y)
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %while.1 = (s32[], f32[4,8]) while(%a), condition=%cond, body=%body.1, metadata={}
}
"""


def test_text_of_a_loop(script):
    steps, sass = script("perf_steps"), script("perf_sass")
    sequence = sass.thunks(THUNKS)
    inside = [each for each in sass.loop_launches(sequence) if len(each.loops) == 1]
    assert steps.calls(HLO, inside) == [steps.Use("ragged_decode__1", 64)]
    picking = HLO.replace("bf16[2,64,128]{2,1,0}}", "bf16[2,64,128]{2,1,0}, s32[2,1,16]{2,1,0}}")
    (use,) = steps.calls(picking, inside)
    assert use == steps.Use("ragged_decode__1", 64, picked=16)
    setting = steps.Setting("OmniKV", 2, 8)
    assert steps.lengths_of(setting, use, 2) == ((8,) * 8,) * 2
    setting = steps.Setting("OmniKV", 2, 100)
    assert steps.lengths_of(setting, use, 2) == ((16,) * 8,) * 2
    assert steps.lengths_of(setting, steps.Use("ragged_decode", 8 * 356), 2) == ((100,) * 8,) * 2
    (line,) = (each.line for each in sass.inner_loops(sequence))
    assert steps.trips_of(HLO, sequence) == {line: 7}
    # What is written and read by the two fusions, weights aside, the keys that a product reads, and its logits.
    keys = 2 * 64 * 128 * 2
    assert steps.moved(steps.body_of(HLO), {keys}, {keys}) == 3 * 128 + keys + 128


def test_report(script):
    model, device = script("perf_model"), script("perf_gpu").DEVICES["h200"]
    cases = script("perf_decode").CASES
    estimates = {case.name: estimate(script) for case in cases}
    steps = {
        at: step(script, at.layers, policy=at.policy, batch=at.batch)
        for at in model.settings(False)
    }
    prefill = model.Prefill(instructions=470, ahead=2, products=12, registers=168, wrong=())
    text, wrong = model.written(device, cases, estimates, prefill, steps, False)
    assert not wrong
    assert "estimate" in text and "nothing has run on" in text and "8 x 8192, unequal" in text
    quick = {
        at: step(script, at.layers, policy=at.policy, launches=99 * at.layers)
        for at in model.settings(True)
    }
    _, wrong = model.written(
        device, cases, estimates, dataclasses.replace(prefill, wrong=("bad",)), quick, True
    )
    assert len(wrong) == 1 + len(quick) // 2
    assert math.isclose(script("perf_steps").per_layer(list(quick.values())[:2]), 99)
