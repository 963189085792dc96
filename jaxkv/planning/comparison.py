"""Table of plans that differ in the policy: memory, and below it seconds of requests, prices and quality."""

from collections.abc import Sequence

from jaxkv._values import amount
from jaxkv.planning.outlook import Outlook
from jaxkv.planning.plans import (
    MachinePlan,
    Plan,
    gigabytes,
    machine_title,
    notes,
    policy_name,
    prompts,
    title,
)
from jaxkv.planning.served import Served
from jaxkv.planning.sizes import CacheParts

_HEAD = (
    "policy",
    "cache",
    "peak",
    "fits",
    "largest batch",
    "largest context",
    "beyond the budget's rows",
)
_MACHINE_HEAD = ("policy", "cache", "peak", "first run", "fits", "largest batch", "largest context")
_TIME_HEAD = ("policy", "tokens/s", "s a request", "requests/h")
_SERVED_HEAD = ("slots", "served/s", "longest pause, s")
_MOST_HEAD = ("requests/h, largest batch", "tokens/h of it", "pays from answer")


def compared(plans: Sequence[Plan | MachinePlan]) -> str:
    """Text with a table of memory and one of speed, prices and quality, a line per plan (they differ in policy)."""
    first = plans[0]
    rows, compiled = list[tuple[str, ...]](), list[str]()
    for plan in plans:
        name, fits = policy_name(plan.setting.policy), "yes" if plan.fits else "NO"
        most = (f"{plan.largest_batch:,}", f"{plan.largest_context:,}")
        if isinstance(plan, MachinePlan):
            sizes = (plan.process.cache, plan.process.peak, plan.process.first_peak)
            rows.append((name, *map(gigabytes, sizes), fits, *most))
            continue
        more = _beyond(plan.sizes.parts, plan.sizes.waiting)
        rows.append((name, gigabytes(plan.cache), gigabytes(plan.sizes.peak), fits, *most, more))
        if plan.compiled is not None:
            compiled += ["", name, *plan.compiled_lines()]
    if isinstance(first, MachinePlan):
        lines = [
            machine_title(first.setting),
            prompts(first.setting),
            "",
            *_aligned([_MACHINE_HEAD, *rows]),
        ]
        said = "Speeds are estimates from rates measured on this machine just now."
    else:
        memory = gigabytes(first.setting.memory)
        whose = f"sizes are those of a {first.setting.gpu.word} with {memory}"
        lines = [title(first.setting), f"{prompts(first.setting)}; {whose}", ""]
        lines += [*_aligned([_HEAD, *rows]), *compiled]
        said = "Speeds are estimates, with rates that one H200 reached."
    lines += ["", *_times(plans), "", said]
    assumed = next((plan.speed.assumed for plan in plans if plan.speed is not None), None)
    lines += [f"Assumed: {assumed}."] if assumed else []
    return "\n".join([*lines, *notes(plans)])


def _beyond(parts: CacheParts, waiting: int) -> str:
    """Text with bytes of a cache's parts other than its budget's rows, and of rows held in prefill; a dash for none."""
    named = [f"{gigabytes(size)} {name}" for name, size in parts.beyond]
    named += [f"{gigabytes(waiting)} all layers' rows in prefill"] if waiting else []
    return "; ".join(named) or "-"


def _times(plans: Sequence[Plan | MachinePlan]) -> list[str]:
    """Lines of a table, a row per plan: tokens/s, seconds, requests an hour, any prices, quality; dash: unknown."""
    outlooks = [plan.outlook for plan in plans]
    priced = any(each.best is not None and each.best.price is not None for each in outlooks)
    scored = next((each.quality for each in outlooks if each.quality is not None), None)
    served = any(each.served is not None for each in outlooks)
    head = [*_TIME_HEAD, *_MOST_HEAD, *(_SERVED_HEAD if served else [])]
    head += ["1,000 requests cost", "1M tokens cost"] if priced else []
    if scored is not None:
        head.append(f"score, {scored.unit}, of {scored.task}")
    rows = [tuple(head)]
    for plan, each in zip(plans, outlooks, strict=True):
        row = [
            policy_name(plan.setting.policy),
            *_figures(each),
            *(_served(each.served) if served else []),
        ]
        if priced:
            best = each.best
            prices = (
                (None, None) if best is None else (best.price_of_requests, best.price_of_tokens)
            )
            row += ["-" if price is None else amount(price) for price in prices]
        if scored is not None:
            row.append("-" if each.quality is None else each.quality.word)
        rows.append(tuple(row))
    return _aligned(rows)


def _figures(outlook: Outlook) -> list[str]:
    """Table cells (texts) of one policy: tokens/s, seconds, requests an hour; largest batch's figures; break-even."""
    speed, asked, best, payback = outlook.speed, outlook.asked, outlook.best, outlook.payback
    return [
        "-" if speed is None else f"{speed.tokens:,.0f}",
        "-" if asked is None else amount(asked.seconds),
        "-" if asked is None else amount(asked.requests),
        "-" if best is None else amount(best.requests),
        "-" if best is None else amount(best.tokens),
        "-" if payback is None else payback.word,
    ]


def _served(served: Served | str | None) -> list[str]:
    """Table cells (texts) of a policy under an engine: slots, requests a second, longest pause; dashes if unknown."""
    if not isinstance(served, Served):
        return ["-"] * len(_SERVED_HEAD)
    return [
        f"{served.slots:,}",
        *("-" if each is None else amount(each) for each in (served.requests, served.pause)),
    ]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """List of lines of a text table made from rows of cells: the first column aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
