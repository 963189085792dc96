"""Plots of an evaluation: scores over budgets, bytes and lengths, maps of length and depth, curves."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._plotting import get_line_style, import_matplotlib, make_figure, render_figure
from jaxkv.analysis.plots import plot_lines, plot_maps
from jaxkv.evals.results import Evaluation, PolicySummary

PLOTS_MISSING = importlib.util.find_spec("matplotlib") is None
_MOST_BINS = 25


def plot_evaluation(evaluation: Evaluation, kinds: Sequence[str]) -> dict[str, bytes]:
    """Make all plots that an evaluation has numbers for; return image bytes by file name, in each format of `kinds`.

    Names are `scores`, `bytes`, `lengths` and `map`, and `curve_` with the name of each list of numbers in
    `SampleRecord.figures`.
    """
    records = evaluation.records
    figures = dict[str, Any]()
    found = dict[str, bytes]()
    # A "$" in the name of a row must not start a formula.
    with import_matplotlib().rc_context({"text.parse_math": False}):
        figures["scores"] = _plot_scores(evaluation)
        if None not in {record.nbytes for record in records}:
            figures["bytes"] = _plot_scores(evaluation, by_bytes=True)
        if evaluation.distinct_prompt_lengths:
            figures["lengths"] = _plot_scores_by_length(evaluation)
        if all(record.tags.keys() >= {"length", "depth"} for record in records):
            figures["map"] = _plot_depth_maps(evaluation)
        for name in records[0].figures:
            curves = [record.figures.get(name) for record in records]
            several = all(isinstance(each, list) and len(each) > 1 for each in curves)
            if several and name != "positions":
                file = re.sub(r"[^\w.-]", "_", name)
                figures[f"curve_{file}"] = _plot_curve(evaluation, name=name)
        for name, figure in figures.items():
            figure.suptitle(f"{evaluation.run_title}\n{evaluation.score_label}", fontsize=10)
            found |= {f"{name}.{kind}": render_figure(figure, kind) for kind in kinds}
    return found


def _get_score_factor(evaluation: Evaluation) -> int:
    """Return the factor of plotted scores: 100 for shares, 1 for other units."""
    return 100 if evaluation.run.unit == "%" else 1


def _plot_scores(evaluation: Evaluation, *, by_bytes: bool = False) -> Any:
    """Plot mean scores and 95% intervals over budgets or MB of kept entries, a line per policy; return the figure.

    A policy without a budget is a horizontal line. A budget given as a share is plotted at the kept entries.
    """
    budgets = {record.policy: record.budget for record in evaluation.records}
    factor = _get_score_factor(evaluation)
    lines = dict[str, list[tuple[Any, PolicySummary]]]()
    for policy in evaluation.policy_names:
        cell = evaluation.cell(policy)
        x = budgets[policy]
        if by_bytes:
            x = (cell.nbytes or 0) / 1e6
        elif isinstance(x, float):
            x = cell.rows
        label = policy if x is None else policy.rpartition("@")[0] or policy
        lines.setdefault(label, []).append((x, cell))
    figure = make_figure(9.0, 5.1)
    axes = figure.subplots()
    ticks = set[int | float]()
    for at, (label, points) in enumerate(lines.items()):
        look = {"label": label, **get_line_style(at)}
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


def _plot_lines(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    across: str,
    up: str,
) -> Any:
    """Return a figure of one panel with these lines by name and axis labels."""
    figure = make_figure(9.0, 5.1)
    plot_lines(figure, lines, across=across, up=up)
    return figure


def _plot_scores_by_length(evaluation: Evaluation) -> Any:
    """Plot mean scores over prompt lengths (tag "length" of samples), a line per policy row; return the figure."""
    lines = {}
    for policy in evaluation.policy_names:
        means = [
            evaluation.cell(policy, length=length).mean
            for length in evaluation.distinct_prompt_lengths
        ]
        lines[policy] = (
            np.asarray(evaluation.distinct_prompt_lengths),
            _get_score_factor(evaluation) * np.asarray(means),
        )
    return _plot_lines(lines, "tokens of the prompt", evaluation.run.unit)


def _plot_depth_maps(evaluation: Evaluation) -> Any:
    """Return a figure with a heat map per policy row: mean score by prompt length (across) and depth (downwards)."""
    lengths, depths = (
        sorted({record.tags[name] for record in evaluation.records}) for name in ("length", "depth")
    )
    if len(depths) > _MOST_BINS:  # random depths: ten bins
        depths = [at / 10 for at in range(10)]
    maps = {}
    for policy in evaluation.policy_names:
        sums, counts = np.zeros((2, len(depths), len(lengths)))
        for record in evaluation.select_records(policy):
            down = np.searchsorted(depths, record.tags["depth"], side="right") - 1
            at = down, lengths.index(record.tags["length"])
            sums[at] += _get_score_factor(evaluation) * record.score
            counts[at] += 1
        title = f"{policy}: {evaluation.format_score(evaluation.cell(policy).mean)}"
        maps[title] = sums / np.where(counts > 0, counts, np.nan)
    figure = make_figure(3.0 * min(len(maps), 5) + 1.5, 2.2 * -(-len(maps) // 5) + 0.6)
    unit = evaluation.run.unit
    most = 100 if unit == "%" else None
    plot_maps(figure, maps, across="tokens of the prompt", down="depth, %", label=unit, most=most)
    for axes in figure.axes[: len(maps)]:
        axes.set_xticks(range(len(lengths)), map(str, lengths), rotation=90, fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{100 * each:.0f}" for each in depths], fontsize=7)
    return figure


def _plot_curve(evaluation: Evaluation, *, name: str) -> Any:
    """Return a figure, a line per policy: samples' mean `figures[name]`, cut to the shortest; losses: running mean."""
    lines = {}
    for policy in evaluation.policy_names:
        figures = [record.figures for record in evaluation.select_records(policy)]
        count = min(len(each[name]) for each in figures)
        ys = np.mean([each[name][:count] for each in figures], axis=0)
        xs = np.asarray(figures[0].get("positions", range(1, count + 1)))[:count]
        if name == "losses":
            # Positions are the ends of intervals, and the last interval may be shorter.
            wide = np.diff(xs, prepend=2 * xs[0] - xs[1])
            ys = np.cumsum(ys * wide) / np.cumsum(wide)
        lines[policy] = xs, ys
    return _plot_lines(lines, "position", f"{name}, running mean" if name == "losses" else name)
