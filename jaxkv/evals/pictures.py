"""Pictures of an evaluation: scores against budgets and lengths, maps of length and depth, curves by position."""

import functools
import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkv._drawing import drawing, saved, sheet, style
from jaxkv.evals.apart import Line, apart
from jaxkv.evals.records import Record
from jaxkv.evals.summary import Cell, Evaluation

_NAMES = ("scores", "bytes", "groups", "lengths", "map")
PLOTS_MISSING = importlib.util.find_spec("matplotlib") is None
# More panels than this are too small to read.
_MOST_PANELS = 30
_MOST_TICKS, _MOST_BINS = 11, 25
# Numbers on the axis of budgets that lie closer than this factor would cover one another.
_APART = 1.1
# Points of 1/72 inch from one error bar of a budget to the next, of which the bar's ends take four.
_BAR = 6
# Sizes that lie further apart than this factor stand on a logarithmic axis.
_WIDE = 4


def draw(evaluation: Evaluation, kinds: Sequence[str]) -> dict[str, bytes]:
    """Dict {file name: image bytes} of every plot that a complete evaluation has numbers for.

    Names are `scores`, `bytes` (where policies differ in them), `groups`, `lengths` and `map`, and those of the entries
    of `Record.figures` that are lists of numbers, with `_curve` appended if one is named as one of these. `kinds` are
    file formats: svg, png and pdf. Without matplotlib, an error names the extra that installs it.
    """
    makers: dict[str, Callable[[], Any]] = {
        "scores": functools.partial(_scores, evaluation, (None,))
    }
    if len(set(_megabytes(evaluation).values())) > 1:
        makers["bytes"] = functools.partial(_bytes, evaluation)
    if 1 < len(evaluation.groups) <= _MOST_PANELS:
        makers["groups"] = functools.partial(_scores, evaluation, evaluation.groups)
    if evaluation.lengths:
        makers["lengths"] = functools.partial(_lengths, evaluation)
    if _has_map(evaluation):
        makers["map"] = functools.partial(_map, evaluation)
    for name in _curves(evaluation):
        file = re.sub(r"[^\w.-]", "_", name)
        makers[f"{file}_curve" if file in _NAMES else file] = functools.partial(
            _curve, evaluation, name
        )
    # A "$" in a row's name must not start a formula.
    with drawing().rc_context({"text.parse_math": False}):
        return {
            f"{name}.{kind}": saved(make(), kind) for name, make in makers.items() for kind in kinds
        }


def _lines(evaluation: Evaluation) -> dict[str, list[str]]:
    """Dict {policy without budget: list of its row names, such as "adakv@128"}; plots join each list to one line."""
    lines: dict[str, list[str]] = {}
    for policy in evaluation.policies:
        lines.setdefault(policy.rpartition("@")[0] or policy, []).append(policy)
    return lines


def _size(evaluation: Evaluation, policy: str) -> float | None:
    """Float x of a policy in plots, in rows: its budget, or the mean rows kept if that is a share; None without."""
    budget = evaluation.run.budgets[policy]
    if isinstance(budget, float):
        # A share of the context or of the whole prompt, whichever was compressed; a published method may keep more.
        return evaluation.cell(policy).rows
    return None if budget is None else float(budget)


def _marks(sizes: Iterable[float]) -> list[float]:
    """Ascending list of sizes that get a tick label on the budget axis: those far enough above the label before."""
    marks: list[float] = []
    for size in sorted(sizes):
        if not marks or size > marks[-1] * _APART:
            marks.append(size)
    return marks


def _percent(evaluation: Evaluation) -> int:
    """Factor that plots multiply scores by: 100 for shares, 1 for other units."""
    return 100 if evaluation.run.unit == "%" else 1


def _score_axis(axes: Any, evaluation: Evaluation) -> None:
    """Labels a plot's y axis with the unit of the scores; for shares also sets its range to about 0 to 100."""
    axes.set_ylabel(evaluation.run.unit)
    if evaluation.run.unit == "%":
        drawn = [value for line in axes.lines for value in line.get_ydata()]
        axes.set_ylim(min(-3, *drawn) - 1, max(103, *drawn) + 1)


def _apart(
    lines: Sequence[Line], height: float, *, percent: bool = False
) -> tuple[list[np.ndarray], float]:
    """Arrays of y values that draw coinciding lines side by side, one per line, and the largest shift of a value."""
    ends = [end for line in lines for end in (line.y.min(), line.y.max())]
    # Axes have a margin of a twentieth at either end.
    wide = 108.0 if percent else 1.1 * (max(ends) - min(ends)) or 1.0
    drawn = apart(lines, 72 * height / wide)
    return drawn, max(float(abs(at - line.y).max()) for at, line in zip(drawn, lines, strict=True))


def _note(off: float) -> str:
    """Text below a title that says how far lines are drawn from their values at most; empty if none is moved."""
    return (
        f"\nequal lines are drawn side by side, at most {off:.2g} from their values" if off else ""
    )


class _Curve(NamedTuple):
    """One line of a plot of scores: label, number of its style, policies, their sizes (None: horizontal), dashes."""

    label: str
    at: int
    policies: Sequence[str]
    sizes: Sequence[float] | None
    dashes: Mapping[str, Any]


def _curves_of(evaluation: Evaluation) -> list[_Curve]:
    """List of `_Curve`, the lines of a score plot: one per policy over its budgets, a horizontal one without budget."""
    found = []
    for at, (label, policies) in enumerate(_lines(evaluation).items()):
        sizes = {policy: _size(evaluation, policy) for policy in policies}
        free = [policy for policy, size in sizes.items() if size is None]
        for number, policy in enumerate(free):
            # Several of one line, OmniKV's at its budgets say, are told apart by their names and dashes.
            alone = len(free) == 1
            dashes = {} if alone else {"linestyle": (0, (1 + 2 * number, 1))}
            found.append(
                _Curve(label if alone else policy, at, [policy], None, {"marker": "", **dashes})
            )
        points = sorted((size, policy) for policy, size in sizes.items() if size is not None)
        if points:
            found.append(
                _Curve(
                    label, at, [policy for _, policy in points], [size for size, _ in points], {}
                )
            )
    return found


def _scores(evaluation: Evaluation, groups: Sequence[str | None]) -> Any:
    """Figure of score against budget: a panel per group, a line per policy, which is horizontal without a budget.

    At a single budget a panel has a bar for each row of the table instead.
    """
    width, height = (4.2, 3.0) if len(groups) > 1 else (7.5, 4.5)
    figure, panels = _panels(len(groups), width=width, height=height)
    curves, off = _curves_of(evaluation), 0.0
    marks = _marks({size for curve in curves for size in curve.sizes or ()})
    ends = (
        (marks[0] / 1.4, max(size for curve in curves for size in curve.sizes or ()) * 1.4)
        if marks
        else (1.0, 2.0)
    )
    beside = _beside(curves, marks, math.log2(ends[1] / ends[0]) / (72 * (width - 2.5)))
    for axes, group in zip(panels, groups, strict=True):
        cells = [[evaluation.cell(policy, group) for policy in curve.policies] for curve in curves]
        if len(marks) == 1:
            _bars(axes, evaluation, group)
        else:
            off = max(off, _panel(axes, evaluation, curves, cells, beside, height - 1.2))
        if len(marks) > 1:
            axes.set_xscale("log", base=2)
            axes.set_xlim(*ends)
            axes.set_xticks(
                marks, [f"{size:,.0f}" for size in marks], rotation=45, ha="right", fontsize=8
            )
            axes.minorticks_off()
            axes.set_xlabel("budget, rows per kv head and layer")
        axes.grid(alpha=0.3)
        if group is not None:
            axes.set_title(group, fontsize=9)
        _score_axis(axes, evaluation)
    figure.suptitle(
        f"{evaluation.title}\n{evaluation.scale}; bars are 95% intervals{_note(off)}", fontsize=10
    )
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    return figure


def _beside(curves: Sequence[_Curve], marks: Sequence[float], point: float) -> list[float]:
    """List of factors on x, one per curve, that put the curves' error bars at one budget side by side.

    `point` is the length of 1/72 inch on the axis of budgets, in octaves.
    """
    sized = [number for number, curve in enumerate(curves) if curve.sizes is not None]
    nearest = min(
        (math.log2(after / before) for before, after in itertools.pairwise(marks)), default=math.inf
    )
    step = min(_BAR * point, 0.8 * nearest / max(1, len(sized)))
    return [
        2 ** (step * (sized.index(at) - (len(sized) - 1) / 2)) if at in sized else 1.0
        for at in range(len(curves))
    ]


def _panel(
    axes: Any,
    evaluation: Evaluation,
    curves: Sequence[_Curve],
    cells: Sequence[Sequence[Cell]],
    beside: Sequence[float],
    height: float,
) -> float:
    """Draws score curves with error bars on one panel; returns the largest distance of a drawn point from its value.

    `beside` are factors on the curves' sizes.
    """
    scale, lines = _percent(evaluation), list[Line]()
    for curve, mine in zip(curves, cells, strict=True):
        means, flat = scale * np.asarray([cell.mean for cell in mine]), curve.sizes is None
        lines.append(Line(np.log2(curve.sizes or [1.0]), means, flat))
    drawn, off = _apart(lines, height, percent=scale == 100)
    for curve, mine, ys, factor in zip(curves, cells, drawn, beside, strict=True):
        look = {"label": curve.label, "linewidth": 1.2, **style(curve.at), **curve.dashes}
        if curve.sizes is None:
            axes.axhline(ys[0], **look)
            continue
        errors = _errors(mine, ys, scale)
        axes.errorbar(
            factor * np.asarray(curve.sizes), ys, yerr=errors, markersize=4, capsize=2, **look
        )
    return off


def _errors(cells: Sequence[Cell], ys: np.ndarray, scale: int) -> np.ndarray:
    """Lengths `[2, n]` of error bars, which end at the interval's ends, wherever their middle is drawn."""
    low = ys - scale * np.asarray([cell.mean if cell.low is None else cell.low for cell in cells])
    high = (
        scale * np.asarray([cell.mean if cell.high is None else cell.high for cell in cells]) - ys
    )
    return np.maximum([low, high], 0)


def _bars(axes: Any, evaluation: Evaluation, group: str | None) -> None:
    """Draws the scores of a panel as bars with error bars, one per row of the table, under its name."""
    names, scale = evaluation.policies, _percent(evaluation)
    cells = [evaluation.cell(name, group) for name in names]
    heights = scale * np.asarray([cell.mean for cell in cells])
    axes.bar(range(len(names)), heights, width=0.6, yerr=_errors(cells, heights, scale), capsize=2)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)


def _megabytes(evaluation: Evaluation) -> dict[str, float]:
    """Dict {policy: mean MB of the rows kept of a sample}, without policies whose samples have no byte counts."""
    sizes = {policy: evaluation.cell(policy).nbytes for policy in evaluation.policies}
    return {policy: size / 1e6 for policy, size in sizes.items() if size is not None}


def _bytes(evaluation: Evaluation) -> Any:
    """Figure of score against the mean MB of kept rows: a line per policy through its budgets, or a point."""
    figure, (axes,) = _panels(1, width=7.5, height=4.5)
    sizes, scale = _megabytes(evaluation), _percent(evaluation)
    named, lines = dict[str, int](), list[Line]()
    for at, (label, policies) in enumerate(_lines(evaluation).items()):
        points = sorted(
            (sizes[name], scale * evaluation.cell(name).mean) for name in policies if name in sizes
        )
        if points:
            named[label] = at
            lines.append(Line(*np.asarray(points).T))
    drawn, off = _apart(lines, 3.3, percent=scale == 100)
    for (label, at), line, ys in zip(named.items(), lines, drawn, strict=True):
        axes.plot(line.x, ys, label=label, markersize=4, linewidth=1.2, **style(at))
    least, most = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    if most > _WIDE * least > 0:
        axes.set_xscale("log", base=2)
        marks = _marks({size for line in lines for size in line.x})
        axes.set_xticks(
            marks, [f"{size:.3g}" for size in marks], rotation=45, ha="right", fontsize=8
        )
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("MB of rows kept for a sample, averaged")
    axes.grid(alpha=0.3)
    _score_axis(axes, evaluation)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}{_note(off)}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _lengths(evaluation: Evaluation) -> Any:
    """Figure of mean score against the samples' prompt length (their tag), one line per row of the table."""
    figure = sheet(7.5, 4.5)
    axes, lengths = figure.subplots(), evaluation.lengths
    scale = _percent(evaluation)
    means = scale * np.asarray(
        [
            [evaluation.cell(policy, length=length).mean for length in lengths]
            for policy in evaluation.policies
        ]
    )
    drawn, off = _apart(
        [Line(np.asarray(lengths, float), each) for each in means], 3.3, percent=scale == 100
    )
    for at, (policy, ys) in enumerate(zip(evaluation.policies, drawn, strict=True)):
        axes.plot(lengths, ys, label=policy, markersize=4, linewidth=1.2, **style(at))
    axes.set_xscale("log", base=2)
    marks = lengths[:: _step(lengths)]
    axes.set_xticks(marks, [f"{length:,}" for length in marks], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens of the prompt")
    _score_axis(axes, evaluation)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}{_note(off)}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _step(values: Sequence[Any]) -> int:
    """Smallest n for which a label at every n-th value of an axis makes at most `_MOST_TICKS` (11) labels."""
    return -(-len(values) // _MOST_TICKS)


def _is_number(value: Any) -> bool:
    """True for an int or float, False for a bool and anything else."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_map(evaluation: Evaluation) -> bool:
    """True if a heat map can be drawn: scores in %, numeric length and depth tags, few lengths, more than one cell."""
    tags = [record.tags for record in evaluation.records]
    both = all(_is_number(each.get("length")) and _is_number(each.get("depth")) for each in tags)
    lengths, depths = ({each.get(name) for each in tags} for name in ("length", "depth"))
    return (
        both
        and evaluation.run.unit == "%"
        and len(lengths) <= _MOST_BINS
        and len(lengths) * len(depths) > 1
    )


def _map(evaluation: Evaluation) -> Any:
    """Figure of heat maps, one per row of the table: mean score by length (across) and depth (downwards)."""
    lines = list(_lines(evaluation).values())
    lengths = sorted({record.tags["length"] for record in evaluation.records})
    depths = sorted({record.tags["depth"] for record in evaluation.records})
    if len(depths) > _MOST_BINS:  # depths were drawn at random: ten bins
        depths = [at / 10 for at in range(10)]
    across = max(map(len, lines))
    if across == 1:  # one map per policy: a square grid
        across = math.ceil(math.sqrt(len(lines)))
        every = [policies[0] for policies in lines]
        lines = [every[at : at + across] for at in range(0, len(every), across)]
    figure = sheet(3.0 * across + 1.2, 2.0 * len(lines) + 0.8)
    grid = figure.subplots(len(lines), across, squeeze=False)
    for row, policies in zip(grid, lines, strict=True):
        for axes in row[len(policies) :]:
            axes.remove()
        for axes, policy in zip(row, policies, strict=False):
            shares = _shares(evaluation.of(policy), lengths, depths)
            image = axes.imshow(
                100 * shares, vmin=0, vmax=100, cmap="cividis", aspect="auto", origin="upper"
            )
            across_at, down_at = (
                list(range(0, len(each), _step(each))) for each in (lengths, depths)
            )
            axes.set_xticks(
                across_at,
                [f"{lengths[at]:,}" for at in across_at],
                rotation=45,
                ha="right",
                fontsize=7,
            )
            axes.set_yticks(down_at, [f"{100 * depths[at]:.0f}" for at in down_at], fontsize=7)
            axes.set_title(
                f"{policy}: {evaluation.shown(evaluation.cell(policy).mean)}", fontsize=9
            )
        row[0].set_ylabel("depth, %", fontsize=8)
    for column in range(across):
        last = [
            row[column] for row, policies in zip(grid, lines, strict=True) if len(policies) > column
        ][-1]
        last.set_xlabel("tokens of the prompt", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="%", shrink=0.8)
    figure.suptitle(evaluation.title, fontsize=10)
    return figure


def _shares(records: Sequence[Record], lengths: Sequence[Any], depths: Sequence[Any]) -> np.ndarray:
    """Array [depths, lengths] of the records' mean scores, each depth rounded down to one of `depths`; NaN if none."""
    sums, counts = np.zeros((len(depths), len(lengths))), np.zeros((len(depths), len(lengths)))
    for record in records:
        depth = max(at for at, depth in enumerate(depths) if depth <= record.tags["depth"])
        at = depth, lengths.index(record.tags["length"])
        sums[at] += record.score
        counts[at] += 1
    return np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)


def _is_curve(value: Any) -> bool:
    """True for a list of at least two numbers, which can be drawn as a curve."""
    return isinstance(value, list) and len(value) > 1 and all(map(_is_number, value))


def _curves(evaluation: Evaluation) -> list[str]:
    """List of the names in `Record.figures` that are lists of at least two numbers in every record; not "positions"."""
    names = dict.fromkeys(
        name for record in evaluation.records for name in record.figures if name != "positions"
    )
    return [
        name
        for name in names
        if all(_is_curve(record.figures.get(name)) for record in evaluation.records)
    ]


def _curve(evaluation: Evaluation, name: str) -> Any:
    """Picture of a `Record.figures` entry by position, a line per policy: samples' mean; losses as running mean."""
    figure = sheet(7.5, 4.5)
    axes = figure.subplots()
    running, lines = name == "losses", list[Line]()
    for policy in evaluation.policies:
        records = evaluation.of(policy)
        count = min(len(record.figures[name]) for record in records)
        values = np.mean([record.figures[name][:count] for record in records], axis=0)
        positions = records[0].figures.get("positions", [])
        placed = _is_curve(positions) and len(positions) >= count
        xs = np.asarray(positions[:count] if placed else range(1, count + 1))
        # The last interval of positions may be a shorter one.
        wide = np.diff(xs, prepend=2 * xs[0] - xs[1])
        values = np.cumsum(values * wide) / np.cumsum(wide) if running else values
        lines.append(Line(xs.astype(float), values))
    drawn, off = _apart(lines, 3.3)
    for at, (policy, line, ys) in enumerate(zip(evaluation.policies, lines, drawn, strict=True)):
        axes.plot(line.x, ys, label=policy, linewidth=1.2, **{**style(at), "marker": ""})
    axes.set_xlabel("position" if placed else "step")
    axes.grid(alpha=0.3)
    axes.set_ylabel(name.replace("_", " ") + (", mean of those so far" if running else ""))
    axes.set_title(evaluation.title + _note(off), fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _panels(count: int, *, width: float, height: float) -> tuple[Any, list[Any]]:
    """New figure and the list of its `count` axes, each of this size in inches, at most five side by side."""
    across = min(count, 5 if count > 4 else max(1, math.ceil(math.sqrt(count))))
    down = -(-count // across)
    figure = sheet(width * across + 1.5, height * down + 0.6)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]
