"""Pictures of an evaluation: scores against budgets, maps of length and depth, curves by position."""

import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxkv._drawing import drawing, saved, sheet, style
from jaxkv.evals.records import Record
from jaxkv.evals.summary import Evaluation

_NAMES = ("scores", "groups", "lengths", "map")
PLOTS_MISSING = importlib.util.find_spec("matplotlib") is None
# More panels than this say nothing on a page.
_MOST_PANELS = 30
_TICKS, _MOST_BINS = 11, 25
# Numbers on the axis of budgets that lie closer would cover one another.
_APART = 1.1


def draw(evaluation: Evaluation, kinds: Sequence[str]) -> dict[str, bytes]:
    """Draws all pictures that an evaluation has the numbers for.

    Args:
        evaluation: a complete one.
        kinds: of svg, png and pdf.

    Returns:
        Files by name: `scores`, `groups`, `lengths`, `map`, and a curve by the name of every figure that is a list of
        numbers; `scores_curve` where one has such a name itself.

    Raises:
        ImportError: without matplotlib, naming the extra that brings it.
    """
    makers: dict[str, Any] = {"scores": lambda: _scores(evaluation, (None,))}
    if 1 < len(evaluation.groups) <= _MOST_PANELS:
        makers["groups"] = lambda: _scores(evaluation, evaluation.groups)
    if evaluation.lengths:
        makers["lengths"] = lambda: _lengths(evaluation)
    if _has_map(evaluation):
        makers["map"] = lambda: _map(evaluation)
    for name in _curves(evaluation):
        file = re.sub(r"[^\w.-]", "_", name)
        makers[f"{file}_curve" if file in _NAMES else file] = lambda name=name: _curve(evaluation, name)
    # A row's name is no formula, whatever is in it.
    with drawing().rc_context({"text.parse_math": False}):
        return {f"{name}.{kind}": saved(make(), kind) for name, make in makers.items() for kind in kinds}


def _lines(evaluation: Evaluation) -> dict[str, list[str]]:
    """Rows by what stands before their budget: the points of a line."""
    lines: dict[str, list[str]] = {}
    for policy in evaluation.policies:
        lines.setdefault(policy.rpartition("@")[0] or policy, []).append(policy)
    return lines


def _size(evaluation: Evaluation, policy: str) -> float | None:
    """Where a row stands on the axis of budgets, in rows; None where it has none."""
    budget = evaluation.run.budgets[policy]
    if isinstance(budget, float):
        # Of what was compressed: the context, or the whole prompt, or more where a published method keeps more.
        return evaluation.cell(policy).rows
    return None if budget is None else float(budget)


def _marks(sizes: Iterable[float]) -> list[float]:
    """Of sizes those that are told on the axis: shares come out a little different for every policy."""
    told: list[float] = []
    for size in sorted(sizes):
        if not told or size > told[-1] * _APART:
            told.append(size)
    return told


def _scores(evaluation: Evaluation, groups: Sequence[str | None]) -> Any:
    """Score against budget, a line for each policy; those without a budget lie across."""
    width, height = (4.2, 3.0) if len(groups) > 1 else (7.5, 4.5)
    figure, panels = _panels(len(groups), width=width, height=height)
    lines = _lines(evaluation)
    sizes = sorted({size for policy in evaluation.policies if (size := _size(evaluation, policy)) is not None})
    for axes, group in zip(panels, groups, strict=True):
        for at, (label, policies) in enumerate(lines.items()):
            _line(axes, evaluation, label, policies, group, at, len(lines))
        if sizes:
            axes.set_xscale("log", base=2)
            axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
            marks = _marks(sizes)
            axes.set_xticks(marks, [f"{size:,.0f}" for size in marks], rotation=45, ha="right", fontsize=8)
            axes.minorticks_off()
            axes.set_xlabel("budget, rows per kv head and layer")
        axes.set_ylabel(evaluation.run.unit)
        axes.grid(alpha=0.3)
        if group is not None:
            axes.set_title(group, fontsize=9)
        if evaluation.run.unit == "%":
            axes.set_ylim(-3, 103)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}; bars are 95% intervals", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    return figure


def _line(
    axes: Any, evaluation: Evaluation, label: str, policies: list[str], group: str | None, at: int, count: int
) -> None:
    """One policy's line; beside those of the same budgets, so that no bar hides another."""
    scale = 100 if evaluation.run.unit == "%" else 1
    sizes = {policy: _size(evaluation, policy) for policy in policies}
    points = sorted((size * 2 ** (0.02 * (at - count / 2)), name) for name, size in sizes.items() if size is not None)
    free = [name for name, size in sizes.items() if size is None]
    for policy in free:
        # Several of one line, OmniKV's at its budgets say, are told apart by their names and dashes.
        dashes = {} if len(free) == 1 else {"linestyle": (0, (1 + 2 * free.index(policy), 1))}
        mean, told = scale * evaluation.cell(policy, group).mean, label if len(free) == 1 else policy
        axes.axhline(mean, label=told, linewidth=1.2, **{**_bare(at), **dashes})
    if points:
        cells = [evaluation.cell(policy, group) for _, policy in points]
        means = np.asarray([cell.mean for cell in cells])
        low = means - [cell.mean if cell.low is None else cell.low for cell in cells]
        high = np.asarray([cell.mean if cell.high is None else cell.high for cell in cells]) - means
        # A hair below 0 by rounding is none.
        errors = scale * np.maximum([low, high], 0)
        xs = [size for size, _ in points]
        axes.errorbar(xs, scale * means, yerr=errors, label=label, markersize=4, capsize=2, linewidth=1.2, **style(at))


def _bare(at: int) -> dict[str, str]:
    return {**style(at), "marker": ""}


def _lengths(evaluation: Evaluation) -> Any:
    """Score against the length that samples were made for."""
    figure = sheet(7.5, 4.5)
    axes = figure.subplots()
    scale = 100 if evaluation.run.unit == "%" else 1
    for at, policy in enumerate(evaluation.policies):
        means = [scale * evaluation.cell(policy, length=length).mean for length in evaluation.lengths]
        axes.plot(evaluation.lengths, means, label=policy, markersize=4, linewidth=1.2, **style(at))
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        *_ticks(evaluation.lengths, lambda value: f"{value:,}", at=evaluation.lengths), rotation=45, ha="right"
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel(evaluation.run.unit)
    if evaluation.run.unit == "%":
        axes.set_ylim(-3, 103)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _has_map(evaluation: Evaluation) -> bool:
    tags = [record.tags for record in evaluation.records]
    both = all(_is_number(each.get("length")) and _is_number(each.get("depth")) for each in tags)
    lengths, depths = ({each.get(name) for each in tags} for name in ("length", "depth"))
    return both and evaluation.run.unit == "%" and len(lengths) <= _MOST_BINS and len(lengths) * len(depths) > 1


def _depth(record: Record, depths: Sequence[Any]) -> int:
    """The line of a map that a record falls into, whose depths begin there."""
    return max(at for at, depth in enumerate(depths) if depth <= record.tags["depth"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _map(evaluation: Evaluation) -> Any:
    """A needle's map for each policy, a line of them for its budgets: length across, depth downwards, as in papers."""
    lines = list(_lines(evaluation).values())
    lengths = sorted({record.tags["length"] for record in evaluation.records})
    depths = sorted({record.tags["depth"] for record in evaluation.records})
    if len(depths) > _MOST_BINS:  # drawn at random
        depths = [at / 10 for at in range(10)]
    across = max(map(len, lines))
    if across == 1:  # as many beside one another as below
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
            image = axes.imshow(100 * shares, vmin=0, vmax=100, cmap="cividis", aspect="auto", origin="upper")
            axes.set_xticks(*_ticks(lengths, lambda value: f"{value:,}"), rotation=45, ha="right", fontsize=7)
            axes.set_yticks(*_ticks(depths, lambda value: f"{100 * value:.0f}"), fontsize=7)
            axes.set_title(f"{policy}: {evaluation.shown(evaluation.cell(policy).mean)}", fontsize=9)
        row[0].set_ylabel("depth, %", fontsize=8)
    for column in range(across):
        last = [row[column] for row, policies in zip(grid, lines, strict=True) if len(policies) > column][-1]
        last.set_xlabel("tokens of the prompt", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="%", shrink=0.8)
    figure.suptitle(evaluation.title, fontsize=10)
    return figure


def _shares(records: Sequence[Record], lengths: Sequence[Any], depths: Sequence[Any]) -> np.ndarray:
    sums, counts = np.zeros((len(depths), len(lengths))), np.zeros((len(depths), len(lengths)))
    for record in records:
        at = _depth(record, depths), lengths.index(record.tags["length"])
        sums[at] += record.score
        counts[at] += 1
    # Where there was no case, there is no colour.
    return np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)


def _ticks(values: Sequence[Any], told: Any, at: Sequence[Any] = ()) -> tuple[list[Any], list[str]]:
    step = -(-len(values) // _TICKS)
    return list(at or range(len(values)))[::step], [told(value) for value in values[::step]]


def _curves(evaluation: Evaluation) -> list[str]:
    """Names of figures that are lists of numbers for every sample."""
    names = dict.fromkeys(name for record in evaluation.records for name in record.figures if name != "positions")
    return [name for name in names if all(_is_curve(record.figures.get(name)) for record in evaluation.records)]


def _is_curve(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(map(_is_number, value))


def _curve(evaluation: Evaluation, name: str) -> Any:
    """A figure by position, averaged over samples as far as the shortest goes; of losses the mean up to there."""
    figure = sheet(7.5, 4.5)
    axes = figure.subplots()
    running = name == "losses"
    for at, policy in enumerate(evaluation.policies):
        records = evaluation.of(policy)
        count = min(len(record.figures[name]) for record in records)
        values = np.mean([record.figures[name][:count] for record in records], axis=0)
        given = records[0].figures.get("positions", [])
        placed = _is_curve(given) and len(given) >= count
        xs = np.asarray(given[:count] if placed else range(1, count + 1))
        # The last stretch of positions may be a shorter one.
        wide = np.diff(xs, prepend=2 * xs[0] - xs[1])
        values = np.cumsum(values * wide) / np.cumsum(wide) if running else values
        axes.plot(xs, values, label=policy, linewidth=1.2, **_bare(at))
    axes.set_xlabel("position" if placed else "step")
    axes.grid(alpha=0.3)
    axes.set_ylabel(name.replace("_", " ") + (", mean of those so far" if running else ""))
    axes.set_title(evaluation.title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _panels(count: int, *, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of so many panels, at most five beside one another."""
    across = min(count, 5 if count > 4 else max(1, math.ceil(math.sqrt(count))))
    down = -(-count // across)
    figure = sheet(width * across + 1.5, height * down + 0.6)
    grid = figure.subplots(down, across, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]
