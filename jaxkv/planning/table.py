"""Plans as people read them: a text, a table of several, a record. A `Plan` prints itself with these."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._values import brief
from jaxkv.planning.setting import Asked, Setting
from jaxkv.policies.policy import Method

HEAD = ("policy", "cache", "peak", "fits", "largest batch", "largest context", "estimated tokens/s")


def gigabytes(size: int) -> str:
    """Decimal gigabytes, as data sheets count them; megabytes below a tenth of one."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def policy_name(policy: Method) -> str:
    """A policy in few words: its class, its budget, and what is not as usual."""
    shown, inner = brief(policy), policy
    while isinstance(below := getattr(inner, "inner", None), Method):
        inner = below
    budget, name = inner.parts().budget, type(inner).__name__
    if budget is None or "budget=" in shown:
        return shown
    given = f"budget={budget!r}"
    if f"{name}(" not in shown:
        # The base that is meant where nothing is said.
        name = type(policy).__name__
    return shown.replace(f"{name}(", f"{name}({given}, ", 1).replace(", )", ")", 1)


def title(setting: Setting) -> str:
    """What is planned for, in one line."""
    split = f"split over {setting.split}" if setting.split > 1 else "whole"
    groups = f" in each of {setting.data} groups" if setting.data > 1 else ""
    return f"{setting.model}, {setting.dtype}, on {setting.gpus} x {setting.gpu.name}: {split}{groups}"


def prompts_of(setting: Asked) -> str:
    """Prompts and new tokens, in words."""
    prompts = f"{setting.batch} prompt{'s' * (setting.batch > 1)} of {setting.context:,} tokens"
    return f"{prompts}, {setting.new:,} new tokens each"


def verdict(plan: Any) -> str:
    """Whether it fits, and by how much."""
    memory, peak = plan.setting.gpu.memory, plan.sizes.peak
    if plan.fits:
        return f"it fits, with {gigabytes(memory - peak)} of {gigabytes(memory)} to spare on each GPU"
    when = "prefill" if plan.prefill_peak >= plan.decode_peak else "decode"
    return f"it does NOT fit: {when} needs {gigabytes(peak)} of {gigabytes(memory)} on each GPU"


def described(plan: Any) -> str:
    """All of a plan, line by line."""
    setting, sizes, memory = plan.setting, plan.sizes, plan.setting.gpu.memory
    rows = f"{sizes.kept:,.0f} of {setting.context:,} rows a head; uncompressed {gigabytes(sizes.full)}"
    share = lambda size: f"{size / memory:.0%} of {gigabytes(memory)}"  # noqa: E731
    facts = [
        ("weights", gigabytes(sizes.weights), ""),
        ("cache", gigabytes(sizes.grown), rows),
        ("activations", gigabytes(sizes.prefill), f"of prefill; {gigabytes(sizes.decode)} of a decode step"),
        ("peak of prefill", gigabytes(sizes.prefill_peak), share(sizes.prefill_peak)),
        ("peak of decode", gigabytes(sizes.decode_peak), share(sizes.decode_peak)),
    ]
    if sizes.host:
        facts.append(("in host memory", gigabytes(sizes.host), "on a GPU's behalf"))
    width = max(len(value) for _, value, _ in facts)
    lines = [title(setting), f"{policy_name(setting.policy)}: {prompts_of(setting)}", ""]
    lines += [f"  {name:<16} {value:>{width}}  {about}".rstrip() for name, value, about in facts]
    sentence = verdict(plan)
    lines += ["", f"{sentence[0].upper()}{sentence[1:]}.", _largest(plan)]
    for each in plan.remedies:
        lines.append(f"  would fit: {each.about} ({gigabytes(each.peak)})")
    if not plan.fits and not plan.remedies:
        lines.append("  nothing that was tried would fit: a smaller budget, another policy, up to 16 times the GPUs")
    lines += _speed(plan)
    lines += [f"Note: {note}." for note in plan.notes]
    if plan.compiled is not None:
        lines += ["", *_compiled(plan)]
    return "\n".join(lines)


def _largest(plan: Any) -> str:
    setting = plan.setting
    batch = f"{plan.largest_batch:,}" if plan.largest_batch else "none"
    most = f"{plan.largest_context:,}" if plan.largest_context else "none"
    limit = " (the model's own limit)" if plan.largest_context == setting.config.max_positions else ""
    of = f"{setting.batch} prompt{'s' * (setting.batch > 1)}"
    return f"Largest batch of such prompts: {batch}. Longest context of {of}: {most}{limit}."


def _speed(plan: Any) -> list[str]:
    found = plan.speed
    if found is None:
        return ["No estimate of speed: rows come from host memory, which is another machine's part."]
    step = f"{found.tokens:,.0f} tokens/s ({found.step * 1e3:.1f} ms a step), prefill {found.prefill:,.1f} s"
    return [f"Estimated, never measured on a GPU: {step}."]


def _compiled(plan: Any) -> list[str]:
    """What the compiler says, and how far arithmetic was off."""
    compiled, sizes = plan.compiled, plan.sizes
    assert compiled is not None
    lines = [str(compiled)]
    for name, ours, theirs in (
        ("prefill", sizes.prefill_peak, compiled.prefill.peak),
        ("decode", sizes.decode_peak, compiled.decode.peak),
    ):
        beside = (ours - sizes.weights) / max(1, theirs - sizes.weights) - 1
        told = f"{gigabytes(ours)} by arithmetic, {gigabytes(theirs)} by the compiler"
        lines.append(f"  {name}: {told}: off by {ours / theirs - 1:+.2%}, weights left out by {beside:+.2%}")
    return lines


def compared(plans: Sequence[Any]) -> str:
    """Several policies for one setting, a row each.

    Args:
        plans: one after the other.

    Returns:
        The table; sizes are a GPU's.
    """
    first = plans[0].setting
    lines = [title(first), f"{prompts_of(first)}; sizes are those of a GPU with {gigabytes(first.gpu.memory)}", ""]
    lines += aligned([HEAD, *(_row(each) for each in plans)])
    for each in plans:
        if each.compiled is not None:
            lines += ["", policy_name(each.setting.policy), *_compiled(each)]
    notes = dict.fromkeys(note for each in plans for note in each.notes)
    lines += ["", "Speeds are estimates: nothing has run on a GPU.", *(f"Note: {note}." for note in notes)]
    return "\n".join(lines)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines: the first column begins where it begins, the others end where they end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(plan: Any) -> tuple[str, ...]:
    return (
        policy_name(plan.setting.policy),
        gigabytes(plan.cache),
        gigabytes(plan.sizes.peak),
        "yes" if plan.fits else "NO",
        f"{plan.largest_batch:,}",
        f"{plan.largest_context:,}",
        "-" if plan.speed is None else f"{plan.speed.tokens:,.0f}",
    )


def record(plan: Any) -> dict[str, Any]:
    """A plan as JSON can have it; sizes in bytes."""
    setting, sizes = plan.setting, plan.sizes
    found: dict[str, Any] = {
        "model": setting.model,
        "policy": policy_name(setting.policy),
        "gpu": setting.gpu.name,
        "gpus": setting.gpus,
        "mesh": {"data": setting.data, "model": setting.split},
        "batch": setting.batch,
        "context": setting.context,
        "new": setting.new,
        "dtype": setting.dtype,
        "memory_bytes": setting.gpu.memory,
        "weights_bytes": sizes.weights,
        "cache_bytes": sizes.grown,
        "uncompressed_bytes": sizes.full,
        "rows": sizes.kept,
        "prefill_activation_bytes": sizes.prefill,
        "decode_activation_bytes": sizes.decode,
        "prefill_peak_bytes": sizes.prefill_peak,
        "decode_peak_bytes": sizes.decode_peak,
        "host_bytes": sizes.host,
        "fits": plan.fits,
        "largest_batch": plan.largest_batch,
        "largest_context": plan.largest_context,
        "would_fit": [{"change": each.about, "peak_bytes": each.peak} for each in plan.remedies],
        "estimated": None if plan.speed is None else dataclasses.asdict(plan.speed),
        "notes": list(plan.notes),
    }
    if plan.compiled is not None:
        peaks = {f"{name}_peak_bytes": getattr(plan.compiled, name).peak for name in ("prefill", "decode")}
        found["compiled"] = peaks | dataclasses.asdict(plan.compiled)
    return found
