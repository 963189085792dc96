"""Turns the rows of `benchmarks.tpu` into tables, measurements beside the estimates that there are for a v6e.

    python -m benchmarks.tpu_report benchmarks/results/tpu-v6-lite.jsonl [--out FILE.md]

Estimates are `perf_tpu`'s, lower bounds made without a TPU: those of kernels over equal segments and of splash
attention are computed here, those of steps are read from the table that `aot_tpu` wrote.
"""

import json

from benchmarks import gpu_report, gpu_rows, perf_tpu
from jaxkv.cache.quantised import STORES
from jaxkv.planning.tpus import tpus

ESTIMATES = gpu_rows.ROOT / "benchmarks" / "results" / "tpu_model.json"


def estimates(path, rows):
    """Makes the estimates for rows of a v6e; for those of other TPUs there are none.

    Args:
        path: JSON file of `aot_tpu`'s rows.
        rows: as a file has them.

    Returns:
        By case: `us` of kernels, `ms` of a whole step.
    """
    found, made = {}, json.loads(path.read_text("utf-8")) if path.exists() else {}
    for row in (each for each in rows if each["device"] == tpus()[perf_tpu.DEVICE].description):
        part, case = row["part"], row["case"]
        if part in KERNELS and case.get("lengths", "equal") == "equal" and case.get("by") != "xla":
            found[gpu_report.plain(case["name"])] = {"us": f"{1e6 * KERNELS[part](case):.1f}"}
        elif "policy" in case and (loop := made.get(f"loops: {loop_of(case)}")):
            # Behind it stand the ideal, and spills.
            found[case["name"]] = {"ms": loop["cells"][-3]}
    return found


def _decode(case, **how):
    """Seconds of a case of attention over equal segments of rows in bfloat16, or as a store holds them."""
    segments, row_bytes = (
        case["batch"] * case["kv_heads"],
        STORES[case.get("store", "dense")].row_bytes(case["dim"], 2),
    )
    return perf_tpu.decode_kernel(segments, case["rows"], row_bytes, **how)


# Seconds of a case, by part.
KERNELS = {
    "decode": _decode,
    "token": _decode,
    "codes": lambda case: _decode(case, coded=True),
    "prefill": lambda case: perf_tpu.splash(1, case["kv_heads"] * case["group"], case["tokens"]),
}


def loop_of(case):
    """Name of a case's row in the table of decode loops, which says what differs from 8 prompts of 32,768 tokens.

    Under policies that keep a budget of rows a step takes as long whatever the prompt.
    """
    name = case["policy"] + (", by XLA" if case["decode"] == "xla" else "")
    name += f", {case['batch']} sequences" if case["batch"] != 8 else ""
    whole = case["policy"] in ("FullKV", "OmniKV")
    name += f", prompts of {case['tokens']:,}" if whole and case["tokens"] != 32768 else ""
    return name + (f", {case['layers']} layers" if "layers" in case else "")


if __name__ == "__main__":
    gpu_report.main(__doc__, ESTIMATES, estimates)
