"""Pictures of an evaluation: scores against budgets, bytes and lengths, maps of length and depth, curves."""

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxkv._drawing import drawing, saved, sheet, style
from jaxkv.evals.results import Cell, Evaluation

PLOTS_MISSING = importlib.util.find_spec("matplotlib") is None
# More panels than this are too small to read.
_MOST_PANELS = 30
_MOST_BINS = 25


def draw(evaluation: Evaluation, kinds: Sequence[str]) -> dict[str, bytes]:
    """Dict {file name: image bytes} of every plot that an evaluation has numbers for, in each of the file formats.

    Names are `scores`, `bytes`, `groups`, `lengths` and `map`, and `curve_` before those of the entries of
    `Record.figures` that are lists of numbers.
    """
    records = evaluation.records
    makers: dict[str, Callable[[Evaluation], Any]] = {"scores": _scores}
    if None not in {record.nbytes for record in records}:
        makers["bytes"] = functools.partial(_scores, by_bytes=True)
    if 1 < len(evaluation.groups) <= _MOST_PANELS:
        makers["groups"] = functools.partial(_scores, groups=evaluation.groups)
    if evaluation.lengths:
        makers["lengths"] = _lengths
    if all(record.tags.keys() >= {"length", "depth"} for record in records):
        makers["map"] = _map
    for name in records[0].figures:
        curves = [record.figures.get(name) for record in records]
        if name != "positions" and all(isinstance(each, list) and len(each) > 1 for each in curves):
            file = re.sub(r"[^\w.-]", "_", name)
            makers[f"curve_{file}"] = functools.partial(_curve, name=name)
    found = dict[str, bytes]()
    # A "$" in a row's name must not start a formula.
    with drawing().rc_context({"text.parse_math": False}):
        for name, make in makers.items():
            figure = make(evaluation)
            figure.suptitle(f"{evaluation.title}\n{evaluation.scale}", fontsize=10)
            found |= {f"{name}.{kind}": saved(figure, kind) for kind in kinds}
    return found


def _factor(evaluation: Evaluation) -> int:
    """Factor that plots multiply scores by: 100 for shares, 1 for other units."""
    return 100 if evaluation.run.unit == "%" else 1


def _scores(
    evaluation: Evaluation, *, groups: Sequence[str | None] = (None,), by_bytes: bool = False
) -> Any:
    """Figure of score against budget, or against MB: a panel per group, a line per policy through its budgets.

    A policy without a budget has a horizontal line. A budget given as a share stands at the rows that were kept.
    """
    budgets = {record.policy: record.budget for record in evaluation.records}
    factor, lines = _factor(evaluation), dict[str, list[str]]()
    for policy in evaluation.policies:
        free = budgets[policy] is None and not by_bytes
        lines.setdefault(policy if free else policy.rpartition("@")[0] or policy, []).append(policy)

    def size(cell: Cell) -> Any:
        """X of a policy; None for one that is drawn across the whole panel."""
        if by_bytes:
            return None if cell.nbytes is None else cell.nbytes / 1e6
        budget = budgets[cell.policy]
        return cell.rows if isinstance(budget, float) else budget

    figure, panels = _panels(len(groups), *((4.2, 3.0) if len(groups) > 1 else (7.5, 4.5)))
    for axes, group in zip(panels, groups, strict=True):
        ticks = set[int | float]()
        for at, (label, policies) in enumerate(lines.items()):
            cells = [evaluation.cell(policy, group) for policy in policies]
            cells.sort(key=lambda cell: size(cell) or 0)
            xs, look = [size(cell) for cell in cells], {"label": label, **style(at)}
            ys = factor * np.asarray([cell.mean for cell in cells])
            if xs == [None]:
                axes.axhline(ys[0], **{**look, "marker": ""})
                continue
            low = [cell.mean if cell.low is None else cell.low for cell in cells]
            high = [cell.mean if cell.high is None else cell.high for cell in cells]
            errors = np.abs(factor * np.asarray([low, high]) - ys)
            axes.errorbar(xs, ys, yerr=errors, capsize=2, **look)
            ticks |= {*xs}
        if by_bytes:
            axes.set_xlabel("MB of rows kept")
        else:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(ticks), [f"{tick:,.0f}" for tick in sorted(ticks)])
            axes.minorticks_off()
            axes.set_xlabel("budget, rows per kv head and layer; bars are 95% intervals")
        axes.set_title("" if group is None else group, fontsize=9)
        axes.set_ylabel(evaluation.run.unit)
    return _with_legend(figure, panels[0])


def _lengths(evaluation: Evaluation) -> Any:
    """Figure of mean score against the samples' prompt length (their tag), one line per row of the table."""
    figure, (axes,) = _panels(1, 7.5, 4.5)
    for at, policy in enumerate(evaluation.policies):
        means = [evaluation.cell(policy, length=length).mean for length in evaluation.lengths]
        ys = _factor(evaluation) * np.asarray(means)
        axes.plot(evaluation.lengths, ys, label=policy, **style(at))
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel(evaluation.run.unit)
    return _with_legend(figure, axes)


def _map(evaluation: Evaluation) -> Any:
    """Figure of heat maps, one per row of the table: mean score by length (across) and depth (downwards)."""
    lengths, depths = (
        sorted({record.tags[name] for record in evaluation.records}) for name in ("length", "depth")
    )
    if len(depths) > _MOST_BINS:  # depths were drawn at random: ten bins
        depths = [at / 10 for at in range(10)]
    figure, panels = _panels(len(evaluation.policies), 3.0, 2.2)
    for axes, policy in zip(panels, evaluation.policies, strict=True):
        sums, counts = np.zeros((2, len(depths), len(lengths)))
        for record in evaluation.of(policy):
            down = np.searchsorted(depths, record.tags["depth"], side="right") - 1
            at = down, lengths.index(record.tags["length"])
            sums[at] += _factor(evaluation) * record.score
            counts[at] += 1
        means = sums / np.where(counts > 0, counts, math.nan)
        most = 100 if evaluation.run.unit == "%" else None
        image = axes.imshow(means, vmin=0, vmax=most, cmap="cividis", aspect="auto")
        axes.set_xticks(range(len(lengths)), map(str, lengths), rotation=90, fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{100 * each:.0f}" for each in depths], fontsize=7)
        axes.set_title(f"{policy}: {evaluation.shown(evaluation.cell(policy).mean)}", fontsize=9)
    figure.supxlabel("tokens of the prompt", fontsize=8)
    figure.supylabel("depth, %", fontsize=8)
    figure.colorbar(image, ax=panels, label=evaluation.run.unit, shrink=0.8)
    return figure


def _curve(evaluation: Evaluation, *, name: str) -> Any:
    """Picture of a `Record.figures` entry by position, a line per policy: samples' mean; losses as running mean."""
    figure, (axes,) = _panels(1, 7.5, 4.5)
    for at, policy in enumerate(evaluation.policies):
        figures = [record.figures for record in evaluation.of(policy)]
        count = min(len(each[name]) for each in figures)
        ys = np.mean([each[name][:count] for each in figures], axis=0)
        xs = np.asarray(figures[0].get("positions", range(1, count + 1)))[:count]
        if name == "losses":
            # Positions stand at the ends of intervals, of which the last may be a shorter one.
            wide = np.diff(xs, prepend=2 * xs[0] - xs[1])
            ys = np.cumsum(ys * wide) / np.cumsum(wide)
        axes.plot(xs, ys, label=policy, **{**style(at), "marker": ""})
    axes.set_xlabel("position")
    axes.set_ylabel(f"{name}, mean of those so far" if name == "losses" else name)
    return _with_legend(figure, axes)


def _panels(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """New figure and the list of its `count` axes, each of this size in inches, at most five side by side."""
    across = min(count, 5)
    down = -(-count // across)
    figure = sheet(width * across + 1.5, height * down + 0.6)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def _with_legend(figure: Any, axes: Any) -> Any:
    """The figure with the legend of one of its panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure
