"""Table of plans with different policies: memory, largest batch and context, speed."""

from collections.abc import Sequence

from jaxkv._checks import amount
from jaxkv.planning.plans import Plan, Served, gigabytes, notes, policy_name, prompts, title
from jaxkv.planning.speed import ASSUMED

_HEAD = ["policy", "cache", "peak", "fits", "largest batch", "largest context", "prefill, s"]
_HEAD += ["tokens/s", "requests/h", "requests/h, largest batch"]


def compared(plans: Sequence[Plan]) -> str:
    """Format plans as a table of memory and speed, with a line per policy; a dash for unknown figures."""
    first, served = plans[0].setting, any(plan.served is not None for plan in plans)
    compiled, rows = list[str](), [[*_HEAD, *(["slots", "served/h"] if served else [])]]
    for plan in plans:
        name, one, most = policy_name(plan.setting.policy), plan.speed, plan.fastest
        row = [
            name,
            gigabytes(plan.cache),
            gigabytes(plan.sizes.peak),
            "yes" if plan.fits else "NO",
        ]
        row += [f"{plan.largest_batch:,}", f"{plan.largest_context:,}"]
        figures: list[float | None] = [None] * 4
        if one is not None:
            figures[:3] = one.prefill, one.tokens, one.requests
        figures[3] = None if most is None else most.requests
        row += ["-" if each is None else amount(each) for each in figures]
        if isinstance(plan.served, Served):
            requests = plan.served.requests
            row += [f"{plan.served.slots:,}", "-" if requests is None else amount(requests)]
        rows.append(row + ["-"] * (len(rows[0]) - len(row)))
        compiled += ["", name, *plan.compiled_lines()] if plan.compiled is not None else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows
    ]
    memory = f"sizes are per {first.gpu.word} with {gigabytes(first.gpu.memory)}"
    lines = [title(first), f"{prompts(first)}; {memory}", "", *table, "", f"Speeds: {ASSUMED}."]
    return "\n".join([*lines, *notes(plans), *compiled])
