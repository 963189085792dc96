"""Pictures of an evaluation: scores against budgets and lengths, maps of length and depth, curves by position."""

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxkv._drawing import drawing, saved, sheet, style
from jaxkv.evals.records import Record
from jaxkv.evals.summary import Evaluation

_NAMES = ("scores", "bytes", "groups", "lengths", "map")
PLOTS_MISSING = importlib.util.find_spec("matplotlib") is None
# More panels than this are too small to read.
_MOST_PANELS = 30
_MOST_TICKS, _MOST_BINS = 11, 25
# Numbers on the axis of budgets that lie closer than this factor would cover one another.
_APART = 1.1


def draw(evaluation: Evaluation, kinds: Sequence[str]) -> dict[str, bytes]:
    """Dict {file name: image bytes} of every plot that a complete evaluation has numbers for.

    Names are `scores`, `bytes` (where policies differ in them), `groups`, `lengths` and `map`, and those of the entries
    of `Record.figures` that are lists of numbers, with `_curve` appended if one is named as one of these. `kinds` are
    file formats: svg, png and pdf. Without matplotlib, an error names the extra that installs it.
    """
    makers: dict[str, Callable[[], Any]] = {"scores": functools.partial(_scores, evaluation, (None,))}
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
        makers[f"{file}_curve" if file in _NAMES else file] = functools.partial(_curve, evaluation, name)
    # A "$" in a row's name must not start a formula.
    with drawing().rc_context({"text.parse_math": False}):
        return {f"{name}.{kind}": saved(make(), kind) for name, make in makers.items() for kind in kinds}


def _lines(evaluation: Evaluation) -> dict[str, list[str]]:
    """Dict {policy name without budget: names of its rows of the table}, which a plot joins to one line."""
    lines: dict[str, list[str]] = {}
    for policy in evaluation.policies:
        lines.setdefault(policy.rpartition("@")[0] or policy, []).append(policy)
    return lines


def _size(evaluation: Evaluation, policy: str) -> float | None:
    """Rows at which a policy stands on plots' x axis: its budget, or for a share the mean rows kept; None without."""
    budget = evaluation.run.budgets[policy]
    if isinstance(budget, float):
        # A share of the context or of the whole prompt, whichever was compressed; a published method may keep more.
        return evaluation.cell(policy).rows
    return None if budget is None else float(budget)


def _marks(sizes: Iterable[float]) -> list[float]:
    """Sizes that get a tick label on the budget axis, ascending; those too close above the last labelled one do not."""
    marks: list[float] = []
    for size in sorted(sizes):
        if not marks or size > marks[-1] * _APART:
            marks.append(size)
    return marks


def _percent(evaluation: Evaluation) -> int:
    """Factor that plots multiply scores by: 100 for shares, 1 for other units."""
    return 100 if evaluation.run.unit == "%" else 1


def _score_axis(axes: Any, evaluation: Evaluation) -> None:
    """Labels the y axis with the unit of the scores; its range is 0 to 100, with a margin, for shares."""
    axes.set_ylabel(evaluation.run.unit)
    if evaluation.run.unit == "%":
        axes.set_ylim(-3, 103)


def _scores(evaluation: Evaluation, groups: Sequence[str | None]) -> Any:
    """Figure of score against budget: a panel per group, a line per policy, which is horizontal without a budget."""
    width, height = (4.2, 3.0) if len(groups) > 1 else (7.5, 4.5)
    figure, panels = _panels(len(groups), width=width, height=height)
    lines = _lines(evaluation)
    sizes = sorted({size for policy in evaluation.policies if (size := _size(evaluation, policy)) is not None})
    for axes, group in zip(panels, groups, strict=True):
        for at, (label, policies) in enumerate(lines.items()):
            # Points of the same budget are drawn side by side, so that no error bar hides another.
            _line(axes, evaluation, label, policies, group, at=at, shift=2 ** (0.02 * (at - len(lines) / 2)))
        if sizes:
            axes.set_xscale("log", base=2)
            axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)
            marks = _marks(sizes)
            axes.set_xticks(marks, [f"{size:,.0f}" for size in marks], rotation=45, ha="right", fontsize=8)
            axes.minorticks_off()
            axes.set_xlabel("budget, rows per kv head and layer")
        axes.grid(alpha=0.3)
        if group is not None:
            axes.set_title(group, fontsize=9)
        _score_axis(axes, evaluation)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}; bars are 95% intervals", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    return figure


def _line(
    axes: Any, evaluation: Evaluation, label: str, policies: list[str], group: str | None, *, at: int, shift: float
) -> None:
    """Draws one policy's scores at its budgets times `shift`, with style number `at`; horizontal without a budget."""
    scale = _percent(evaluation)
    sizes = {policy: _size(evaluation, policy) for policy in policies}
    free = [name for name, size in sizes.items() if size is None]
    for policy in free:
        # Several of one line, OmniKV's at its budgets say, are told apart by their names and dashes.
        dashes = {} if len(free) == 1 else {"linestyle": (0, (1 + 2 * free.index(policy), 1))}
        mean, name = scale * evaluation.cell(policy, group).mean, label if len(free) == 1 else policy
        axes.axhline(mean, label=name, linewidth=1.2, **{**style(at), "marker": "", **dashes})
    points = sorted((size * shift, name) for name, size in sizes.items() if size is not None)
    if points:
        cells = [evaluation.cell(policy, group) for _, policy in points]
        means = np.asarray([cell.mean for cell in cells])
        low = means - [cell.mean if cell.low is None else cell.low for cell in cells]
        high = np.asarray([cell.mean if cell.high is None else cell.high for cell in cells]) - means
        # Rounding may give lengths slightly below 0.
        errors = scale * np.maximum([low, high], 0)
        xs = [size for size, _ in points]
        axes.errorbar(xs, scale * means, yerr=errors, label=label, markersize=4, capsize=2, linewidth=1.2, **style(at))


def _megabytes(evaluation: Evaluation) -> dict[str, float]:
    """Dict {policy: mean MB of the rows kept of a sample}, without policies whose samples have no byte counts."""
    sizes = {policy: evaluation.cell(policy).nbytes for policy in evaluation.policies}
    return {policy: size / 1e6 for policy, size in sizes.items() if size is not None}


def _bytes(evaluation: Evaluation) -> Any:
    """Figure of score against the mean MB of kept rows: a line per policy through its budgets, or a point."""
    figure, (axes,) = _panels(1, width=7.5, height=4.5)
    sizes, scale = _megabytes(evaluation), _percent(evaluation)
    for at, (label, policies) in enumerate(_lines(evaluation).items()):
        points = sorted((sizes[name], scale * evaluation.cell(name).mean) for name in policies if name in sizes)
        if points:
            axes.plot(*zip(*points, strict=True), label=label, markersize=5, linewidth=1.2, **style(at))
    axes.set_xlim(left=0)
    axes.set_xlabel("MB of rows kept for a sample, averaged")
    axes.grid(alpha=0.3)
    _score_axis(axes, evaluation)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _lengths(evaluation: Evaluation) -> Any:
    """Figure of mean score against the samples' prompt length (their tag), one line per row of the table."""
    figure = sheet(7.5, 4.5)
    axes, lengths = figure.subplots(), evaluation.lengths
    for at, policy in enumerate(evaluation.policies):
        means = [_percent(evaluation) * evaluation.cell(policy, length=length).mean for length in lengths]
        axes.plot(lengths, means, label=policy, markersize=4, linewidth=1.2, **style(at))
    axes.set_xscale("log", base=2)
    marks = lengths[:: _step(lengths)]
    axes.set_xticks(marks, [f"{length:,}" for length in marks], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens of the prompt")
    _score_axis(axes, evaluation)
    figure.suptitle(f"{evaluation.title}\n{evaluation.scale}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _step(values: Sequence[Any]) -> int:
    """The n for which labelling every n-th value of an axis makes at most `_MOST_TICKS` labels."""
    return -(-len(values) // _MOST_TICKS)


def _is_number(value: Any) -> bool:
    """True for an int or float, False for a bool and anything else."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_map(evaluation: Evaluation) -> bool:
    """True if scores are shares and all samples have a length and a depth: two pairs or more, few enough lengths."""
    tags = [record.tags for record in evaluation.records]
    both = all(_is_number(each.get("length")) and _is_number(each.get("depth")) for each in tags)
    lengths, depths = ({each.get(name) for each in tags} for name in ("length", "depth"))
    return both and evaluation.run.unit == "%" and len(lengths) <= _MOST_BINS and len(lengths) * len(depths) > 1


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
            image = axes.imshow(100 * shares, vmin=0, vmax=100, cmap="cividis", aspect="auto", origin="upper")
            across_at, down_at = (list(range(0, len(each), _step(each))) for each in (lengths, depths))
            axes.set_xticks(across_at, [f"{lengths[at]:,}" for at in across_at], rotation=45, ha="right", fontsize=7)
            axes.set_yticks(down_at, [f"{100 * depths[at]:.0f}" for at in down_at], fontsize=7)
            axes.set_title(f"{policy}: {evaluation.shown(evaluation.cell(policy).mean)}", fontsize=9)
        row[0].set_ylabel("depth, %", fontsize=8)
    for column in range(across):
        last = [row[column] for row, policies in zip(grid, lines, strict=True) if len(policies) > column][-1]
        last.set_xlabel("tokens of the prompt", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="%", shrink=0.8)
    figure.suptitle(evaluation.title, fontsize=10)
    return figure


def _shares(records: Sequence[Record], lengths: Sequence[Any], depths: Sequence[Any]) -> np.ndarray:
    """Mean score of records by depth (rounded down to one of `depths`) and length, as an array; NaN without samples."""
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
    names = dict.fromkeys(name for record in evaluation.records for name in record.figures if name != "positions")
    return [name for name in names if all(_is_curve(record.figures.get(name)) for record in evaluation.records)]


def _curve(evaluation: Evaluation, name: str) -> Any:
    """Figure of one entry of `Record.figures` by position, averaged over samples; losses as a running mean."""
    figure = sheet(7.5, 4.5)
    axes = figure.subplots()
    running = name == "losses"
    for at, policy in enumerate(evaluation.policies):
        records = evaluation.of(policy)
        count = min(len(record.figures[name]) for record in records)
        values = np.mean([record.figures[name][:count] for record in records], axis=0)
        positions = records[0].figures.get("positions", [])
        placed = _is_curve(positions) and len(positions) >= count
        xs = np.asarray(positions[:count] if placed else range(1, count + 1))
        # The last interval of positions may be a shorter one.
        wide = np.diff(xs, prepend=2 * xs[0] - xs[1])
        values = np.cumsum(values * wide) / np.cumsum(wide) if running else values
        axes.plot(xs, values, label=policy, linewidth=1.2, **{**style(at), "marker": ""})
    axes.set_xlabel("position" if placed else "step")
    axes.grid(alpha=0.3)
    axes.set_ylabel(name.replace("_", " ") + (", mean of those so far" if running else ""))
    axes.set_title(evaluation.title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _panels(count: int, *, width: float, height: float) -> tuple[Any, list[Any]]:
    """New figure, and a list of its `count` axes, each of this size in inches, at most five side by side."""
    across = min(count, 5 if count > 4 else max(1, math.ceil(math.sqrt(count))))
    down = -(-count // across)
    figure = sheet(width * across + 1.5, height * down + 0.6)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]
