"""Plots of an evaluation: scores over budgets, bytes and lengths, maps of length and depth, curves."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._plotting import import_matplotlib, saved, sheet, style
from jaxkv.analysis.plots import draw_lines, draw_maps
from jaxkv.evals.results import Cell, Evaluation

PLOTS_MISSING = importlib.util.find_spec("matplotlib") is None
_MOST_BINS = 25


def draw(evaluation: Evaluation, kinds: Sequence[str]) -> dict[str, bytes]:
    """Draw every plot that an evaluation has numbers for, in each file format; return image bytes by file name.

    Names are `scores`, `bytes`, `lengths` and `map`, and `curve_` with the name of each list of numbers in
    `Record.figures`.
    """
    records, figures, found = evaluation.records, dict[str, Any](), dict[str, bytes]()
    # A "$" in the name of a row must not start a formula.
    with import_matplotlib().rc_context({"text.parse_math": False}):
        figures["scores"] = _scores(evaluation)
        if None not in {record.nbytes for record in records}:
            figures["bytes"] = _scores(evaluation, by_bytes=True)
        if evaluation.lengths:
            figures["lengths"] = _lengths(evaluation)
        if all(record.tags.keys() >= {"length", "depth"} for record in records):
            figures["map"] = _map(evaluation)
        for name in records[0].figures:
            curves = [record.figures.get(name) for record in records]
            several = all(isinstance(each, list) and len(each) > 1 for each in curves)
            if several and name != "positions":
                file = re.sub(r"[^\w.-]", "_", name)
                figures[f"curve_{file}"] = _curve(evaluation, name=name)
        for name, figure in figures.items():
            figure.suptitle(f"{evaluation.title}\n{evaluation.scale}", fontsize=10)
            found |= {f"{name}.{kind}": saved(figure, kind) for kind in kinds}
    return found


def _factor(evaluation: Evaluation) -> int:
    """Factor of plotted scores: 100 for shares, 1 for other units."""
    return 100 if evaluation.run.unit == "%" else 1


def _scores(evaluation: Evaluation, *, by_bytes: bool = False) -> Any:
    """Plot scores over budgets, or over MB, with a line per policy through its budgets.

    A policy without a budget is a horizontal line. A budget given as a share is plotted at the kept entries.
    """
    budgets = {record.policy: record.budget for record in evaluation.records}
    factor, lines = _factor(evaluation), dict[str, list[tuple[Any, Cell]]]()
    for policy in evaluation.policies:
        cell, x = evaluation.cell(policy), budgets[policy]
        if by_bytes:
            x = (cell.nbytes or 0) / 1e6
        elif isinstance(x, float):
            x = cell.rows
        label = policy if x is None else policy.rpartition("@")[0] or policy
        lines.setdefault(label, []).append((x, cell))
    figure = sheet(9.0, 5.1)
    axes, ticks = figure.subplots(), set[int | float]()
    for at, (label, points) in enumerate(lines.items()):
        look = {"label": label, **style(at)}
        if points[0][0] is None:
            axes.axhline(factor * points[0][1].mean, **{**look, "marker": ""})
            continue
        points.sort(key=lambda point: point[0])
        xs, cells = zip(*points, strict=True)
        ys = factor * np.asarray([cell.mean for cell in cells])
        low = [cell.mean if cell.low is None else cell.low for cell in cells]
        high = [cell.mean if cell.high is None else cell.high for cell in cells]
        errors = np.abs(factor * np.asarray([low, high]) - ys)
        axes.errorbar(xs, ys, yerr=errors, capsize=2, **look)
        ticks |= {*xs}
    if by_bytes:
        axes.set_xlabel("MB of kept entries")
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [f"{tick:,.0f}" for tick in sorted(ticks)])
        axes.minorticks_off()
        axes.set_xlabel("budget, entries per kv head and layer; bars are 95% intervals")
    axes.set_ylabel(evaluation.run.unit)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _lines(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    across: str,
    up: str,
) -> Any:
    """Plot these lines in a figure of one panel."""
    figure = sheet(9.0, 5.1)
    draw_lines(figure, lines, across=across, up=up)
    return figure


def _lengths(evaluation: Evaluation) -> Any:
    """Plot the mean score over the prompt length (tag of the samples), with one line per row of the table."""
    lines = {}
    for policy in evaluation.policies:
        means = [evaluation.cell(policy, length=length).mean for length in evaluation.lengths]
        lines[policy] = np.asarray(evaluation.lengths), _factor(evaluation) * np.asarray(means)
    return _lines(lines, "tokens of the prompt", evaluation.run.unit)


def _map(evaluation: Evaluation) -> Any:
    """Plot one heat map per row of the table: mean score by length (across) and depth (downwards)."""
    lengths, depths = (
        sorted({record.tags[name] for record in evaluation.records}) for name in ("length", "depth")
    )
    if len(depths) > _MOST_BINS:  # random depths: ten bins
        depths = [at / 10 for at in range(10)]
    maps = {}
    for policy in evaluation.policies:
        sums, counts = np.zeros((2, len(depths), len(lengths)))
        for record in evaluation.of(policy):
            down = np.searchsorted(depths, record.tags["depth"], side="right") - 1
            at = down, lengths.index(record.tags["length"])
            sums[at] += _factor(evaluation) * record.score
            counts[at] += 1
        title = f"{policy}: {evaluation.shown(evaluation.cell(policy).mean)}"
        maps[title] = sums / np.where(counts > 0, counts, np.nan)
    figure = sheet(3.0 * min(len(maps), 5) + 1.5, 2.2 * -(-len(maps) // 5) + 0.6)
    unit = evaluation.run.unit
    most = 100 if unit == "%" else None
    draw_maps(figure, maps, across="tokens of the prompt", down="depth, %", label=unit, most=most)
    for axes in figure.axes[: len(maps)]:
        axes.set_xticks(range(len(lengths)), map(str, lengths), rotation=90, fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{100 * each:.0f}" for each in depths], fontsize=7)
    return figure


def _curve(evaluation: Evaluation, *, name: str) -> Any:
    """Plot the samples' mean of a `Record.figures` list over positions, a line per policy; losses as running mean."""
    lines = {}
    for policy in evaluation.policies:
        figures = [record.figures for record in evaluation.of(policy)]
        count = min(len(each[name]) for each in figures)
        ys = np.mean([each[name][:count] for each in figures], axis=0)
        xs = np.asarray(figures[0].get("positions", range(1, count + 1)))[:count]
        if name == "losses":
            # Positions are the ends of intervals, and the last interval may be shorter.
            wide = np.diff(xs, prepend=2 * xs[0] - xs[1])
            ys = np.cumsum(ys * wide) / np.cumsum(wide)
        lines[policy] = xs, ys
    return _lines(lines, "position", f"{name}, running mean" if name == "losses" else name)
