"""Plots peak memory over context, with one line per policy and the limit of the GPU."""

import contextlib
import dataclasses
from collections.abc import Sequence

from jaxkv._plotting import get_line_style, make_figure, render_figure
from jaxkv.planning.memory_sizes import compute_memory_sizes
from jaxkv.planning.plans import Plan, format_plan_title, format_policy
from jaxkv.planning.setting import Workload

_LEAST = 1024
_POINTS = 15


def peaks(setting: Workload) -> list[tuple[int, int]]:
    """List (context, peak bytes of a device), up to 15 valid contexts, doubling from about 1,024 to all positions."""
    limit = setting.config.max_positions
    found = list[tuple[int, int]]()
    for step in reversed(range(_POINTS)):
        length = limit >> step
        if length >= min(_LEAST, limit):
            with contextlib.suppress(ValueError):
                found.append(
                    (
                        length,
                        compute_memory_sizes(
                            dataclasses.replace(setting, context=length)
                        ).peak_device_bytes,
                    )
                )
    return found


def plot_peak_memory(plans: Sequence[Plan], kind: str) -> bytes:
    """Plot peak memory over context, a line per plan, and a device's memory; return image bytes in format `kind`."""
    first = plans[0].setting
    figure = make_figure(7.5, 4.5)
    axes = figure.subplots()
    for at, each in enumerate(plans):
        points = peaks(each.setting)
        xs = [length for length, _ in points]
        ys = [size / 1e9 for _, size in points]
        axes.plot(
            xs, ys, markersize=4, label=format_policy(each.setting.policy), **get_line_style(at)
        )
    axes.axhline(first.gpu.memory / 1e9, color="black", linewidth=1.5)
    label = f"{first.gpu.name}: {first.gpu.memory / 1e9:.0f} GB"
    axes.annotate(
        label,
        (0.01, first.gpu.memory / 1e9),
        xycoords=("axes fraction", "data"),
        va="bottom",
        fontsize=9,
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"tokens of each of {first.batch} prompts")
    axes.set_ylabel(f"peak memory per {first.gpu.word}, GB")
    axes.set_title(format_plan_title(first), fontsize=10)
    axes.legend(fontsize=9)
    return render_figure(figure, kind)
