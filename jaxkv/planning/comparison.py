"""Table of plans with different policies: memory, largest batch and context, speed."""

from collections.abc import Sequence

from jaxkv._checks import format_number
from jaxkv.planning.plans import (
    Plan,
    ServingPlan,
    format_gigabytes,
    format_notes,
    format_plan_title,
    format_policy,
    format_prompts,
)
from jaxkv.planning.speed import ASSUMED

_HEAD = ["policy", "cache", "peak", "fits", "largest batch", "largest context", "prefill, s"]
_HEAD += ["tokens/s", "requests/h", "requests/h, largest batch"]


def compared(plans: Sequence[Plan]) -> str:
    """Return a text table of plans, a line per policy: sizes, fit, limits, speed; notes and XLA's figures below."""
    first = plans[0].setting
    served = any(plan.served is not None for plan in plans)
    compiled = list[str]()
    rows = [[*_HEAD, *(["slots", "served/h"] if served else [])]]
    for plan in plans:
        name = format_policy(plan.setting.policy)
        one = plan.speed
        most = plan.fastest
        row = [
            name,
            format_gigabytes(plan.cache),
            format_gigabytes(plan.sizes.peak_device_bytes),
            "yes" if plan.fits else "NO",
        ]
        row += [f"{plan.largest_batch:,}", f"{plan.largest_context:,}"]
        figures: list[float | None] = [None] * 4
        if one is not None:
            figures[:3] = one.prefill, one.tokens_per_second, one.requests
        figures[3] = None if most is None else most.requests
        row += ["-" if each is None else format_number(each) for each in figures]
        if isinstance(plan.served, ServingPlan):
            requests = plan.served.requests
            row += [f"{plan.served.slots:,}", "-" if requests is None else format_number(requests)]
        rows.append(row + ["-"] * (len(rows[0]) - len(row)))
        compiled += ["", name, *plan.format_compiled_figures()] if plan.compiled is not None else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows
    ]
    memory = f"sizes are per {first.gpu.word} with {format_gigabytes(first.gpu.memory)}"
    lines = [
        format_plan_title(first),
        f"{format_prompts(first)}; {memory}",
        "",
        *table,
        "",
        f"Speeds: {ASSUMED}.",
    ]
    return "\n".join([*lines, *format_notes(plans), *compiled])
