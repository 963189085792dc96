"""What came out of an evaluation: means with intervals by policy and group, what they cost, and tables of them."""

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxkv._errors import require
from jaxkv.evals.folder import read_lines
from jaxkv.evals.records import Record, Run, read_record, read_run

# More of them are samples' own, and none that they were made for.
_MOST_LENGTHS = 25
_Z = 1.959964  # of the normal distribution's middle 95%


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Samples of one policy and group together.

    Attributes:
        policy: the row's name, such as "adakv@128".
        group: samples that count together; "mean" for the mean of all groups, each of the same weight.
        n: samples.
        mean: of their scores.
        low: where a 95% interval of the mean begins; None where one sample says nothing of it.
        high: where it ends.
        tokens: of a prompt, averaged; None where the task does not count them.
        rows: kept of it per kv head and layer, averaged; None likewise.
        nbytes: that they weigh, wherever they lie, averaged; None likewise.
    """

    policy: str
    group: str
    n: int
    mean: float
    low: float | None
    high: float | None
    tokens: float | None = None
    rows: float | None = None
    nbytes: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One policy's scores less another one's, sample by sample.

    Attributes:
        mean: of the differences; above 0 the first has the higher scores.
        low: where a 95% interval of the mean begins; None for one sample.
        high: where it ends.
        above: samples at which the first has the higher score.
        below: samples at which the second has.
        n: samples that both have.
    """

    mean: float
    low: float | None
    high: float | None
    above: int
    below: int
    n: int


def interval(scores: Float[np.ndarray, " n"], *, shares: bool = True) -> tuple[float, float] | None:
    """A 95% interval of the mean of independent scores.

    Args:
        scores: any.
        shares: they lie in [0, 1], and so does their mean.

    Returns:
        Its ends: Wilson's where every share is 0 or 1, and where all are alike, as wide as if they were; Student's
        otherwise, None for one score that is no share.

    Raises:
        ValueError: for no scores, and for shares that are none.

    References:
        Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    scores = np.asarray(scores, np.float64)
    require(scores.ndim == 1 and scores.size > 0, "scores", f"of shape {scores.shape}", "give a list of at least 1")
    inside = not shares or bool(((scores >= 0) & (scores <= 1)).all())
    require(inside, "scores", scores.tolist(), "shares lie in [0, 1]: give shares=False for others")
    n, mean = len(scores), float(scores.mean())
    if shares and (np.isin(scores, (0.0, 1.0)).all() or (scores == scores[0]).all()):
        middle, width = mean + _Z**2 / (2 * n), _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n * n))
        scale = 1 + _Z**2 / n
        return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)
    found = _student(scores)
    return found if found is None or not shares else (max(0.0, found[0]), min(1.0, found[1]))


def _student(values: Float[np.ndarray, " n"]) -> tuple[float, float] | None:
    n, mean = len(values), float(values.mean())
    if n == 1:
        return None
    width = _quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return mean - width, mean + width


def _of_differences(apart: Float[np.ndarray, " n"], *, shares: bool) -> tuple[float, float] | None:
    """Student's; of differences of shares that are all alike, as far as those not drawn may pull the mean."""
    n, first = len(apart), float(apart[0])
    if not shares or n == 1 or (apart != first).any():
        return _student(apart)
    # Wilson's upper end of none among n that differ: they lie in [-1, 1].
    others = _Z**2 / (n + _Z**2)
    return first - others * (1 + first), first + others * (1 - first)


def _quantile(freedom: int) -> float:
    """Up to where 97.5% of Student's distribution lie."""
    from scipy import special  # imported late: it takes longer than all of jaxkv's own files

    return float(special.stdtrit(freedom, 0.975))


def _together(means: Sequence[float], ends: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """An interval of the mean of independent means, of their intervals (Zou and Donner 2008, "MOVER")."""
    known = [each for each in ends if each is not None]
    if len(known) < len(ends):
        return None
    middle, count = sum(means) / len(means), len(means)
    down = math.sqrt(sum((mean - low) ** 2 for mean, (low, _) in zip(means, known, strict=True))) / count
    up = math.sqrt(sum((high - mean) ** 2 for mean, (_, high) in zip(means, known, strict=True))) / count
    return middle - down, middle + up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A finished evaluation: of a whole task, or of one shard of it.

    Attributes:
        folder: where it lies.
        run: what was asked.
        records: what became of every sample under every policy.
    """

    folder: Path
    run: Run
    records: tuple[Record, ...] = dataclasses.field(repr=False)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Evaluation":
        """Reads what `jaxkv.evaluate` or `jaxkv eval` has written.

        Args:
            folder: the one that was given to it.

        Returns:
            The evaluation.

        Raises:
            ValueError: where there is none, or one that has not come to its end.
            TypeError: for what is no path.
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folder={folder!r}: give the folder of an evaluation")
        path = Path(folder).expanduser()
        try:
            run = read_run(path)
            lines = read_lines(path)
        except NotADirectoryError:
            run, lines = None, []
        require(run is not None, "folder", str(folder), "no evaluation lies there: give what --out was")
        assert run is not None
        remedy = f"{run.lines} lines make it complete: run the same command again, and it goes on from there"
        require(len(lines) == run.lines, "folder", f"{folder}, {len(lines)} lines", remedy)
        records = [read_record(line, f"{path}, line {at}") for at, line in enumerate(lines, start=1)]
        each = len(records) // max(1, len(run.policies))
        parts = [records[at : at + each] for at in range(0, len(records), max(1, each))]
        for name, part in zip(run.policies, parts, strict=True):
            same = [(name, one.id) for one in parts[0]] == [(record.policy, record.id) for record in part]
            remedy = "they are not those of the others: the file was changed; remove them and those behind them, and "
            require(same, "folder", f"{folder}, lines of {name}", remedy + "run the same command again")
        return cls(folder=path, run=run, records=tuple(records))

    @property
    def policies(self) -> tuple[str, ...]:
        """Rows, in their order."""
        return tuple(self.run.policies)

    @functools.cached_property
    def groups(self) -> tuple[str, ...]:
        """Groups of samples, in the order of the task's samples."""
        return tuple(dict.fromkeys(record.group for record in self.records))

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that samples were made for, ascending; none where they have no tag "length", or one each."""
        given: list[Any] = [record.tags.get("length") for record in self.records]
        found = sorted(set(given)) if all(isinstance(each, int) for each in given) else []
        return tuple(found) if 1 < len(found) <= _MOST_LENGTHS else ()

    @functools.cached_property
    def _by(self) -> dict[str, list[Record]]:
        by: dict[str, list[Record]] = collections.defaultdict(list)
        for record in self.records:
            by[record.policy].append(record)
        return by

    def of(self, policy: str, group: str | None = None, **tags: Any) -> list[Record]:
        """Records of a policy.

        Args:
            policy: a row's name.
            group: of one group; all by default.
            **tags: that they have, such as `length=4096`.

        Returns:
            In the order of the samples.

        Raises:
            ValueError: for names that are not there, and for tags that none has.
        """
        require(policy in self.policies, "policy", policy, f"there are {', '.join(self.policies)}")
        require(group is None or group in self.groups, "group", group, f"there are {', '.join(self.groups)}")
        found = [record for record in self._by[policy] if group is None or record.group == group]
        for name, value in tags.items():
            found = [record for record in found if name in record.tags and record.tags[name] == value]
            require(bool(found), name, value, "no sample has this tag")
        return found

    def scores(self, policy: str, group: str | None = None, **tags: Any) -> Float[np.ndarray, " n"]:
        """Scores of a policy, in the order of the samples; see `of`."""
        return np.asarray([record.score for record in self.of(policy, group, **tags)], np.float64)

    def cell(self, policy: str, group: str | None = None, **tags: Any) -> Cell:
        """A policy's mean score, how sure it is, and what it cost.

        Args:
            policy: a row's name.
            group: of one group; by default the mean of all groups, each of the same weight.
            **tags: of samples that have them, such as `length=4096`.

        Returns:
            The cell.

        Raises:
            ValueError: for names that are not there, and for tags that none has.
        """
        records, shares = self.of(policy, group, **tags), self.run.unit == "%"
        by: dict[str, list[float]] = {}
        for record in records:
            by.setdefault(record.group, []).append(record.score)
        parts = [np.asarray(scores, np.float64) for scores in by.values()]
        means, ends = [float(part.mean()) for part in parts], [interval(part, shares=shares) for part in parts]
        found = _together(means, ends)
        low, high = (None, None) if found is None else found
        return Cell(
            policy=policy,
            group="mean" if group is None else group,
            n=len(records),
            mean=sum(means) / len(means),
            low=low,
            high=high,
            **{name: _mean(records, name) for name in ("tokens", "rows", "nbytes")},
        )

    def difference(self, first: str, second: str, group: str | None = None) -> Difference:
        """One policy against another one on the same samples, which says more than two intervals.

        Args:
            first: a row's name.
            second: another one's.
            group: of one group; by default the mean of all groups, each of the same weight, as in `cell`.

        Returns:
            The difference.

        Raises:
            ValueError: for names that are not there.
        """
        by: dict[str, list[float]] = {}
        for one, other in zip(self.of(first, group), self.of(second, group), strict=True):
            by.setdefault(one.group, []).append(one.score - other.score)
        parts = [np.asarray(each, np.float64) for each in by.values()]
        means = [float(part.mean()) for part in parts]
        shares = self.run.unit == "%"
        ends = _together(means, [_of_differences(part, shares=shares) for part in parts])
        apart = np.concatenate(parts)
        return Difference(
            mean=sum(means) / len(means),
            low=None if ends is None else ends[0],
            high=None if ends is None else ends[1],
            above=int((apart > 0).sum()),
            below=int((apart < 0).sum()),
            n=len(apart),
        )

    def as_dict(self) -> dict[str, Any]:
        """What was asked, and every cell, as JSON has it."""
        cells = [self.cell(policy, group) for policy in self.policies for group in (*self.groups, None)]
        return {"run": self.run.as_dict(), "cells": [dataclasses.asdict(cell) for cell in cells]}

    def table(self) -> str:
        """Markdown: a line for each policy with what it costs, then groups by policy, budget by budget."""
        head = f"| policy | {self.scale} | 95% interval | n | rows kept | MB | prompt tokens |"
        lines = [f"# {self.title}", "", head, "|---|---:|:---:|---:|---:|---:|---:|"]
        for policy in self.policies:
            cell = self.cell(policy)
            costs = [number(cell.rows, 1), number(cell.nbytes, 3, 1e6), number(cell.tokens, 0)]
            row = [policy, self.shown(cell.mean), self.shown_interval(cell), str(cell.n), *costs]
            lines.append(f"| {' | '.join(map(_escaped, row))} |")
        for what, rows in self.sections().items():
            for part in self.blocks():
                lines += [
                    "",
                    f"| {what} | n | {' | '.join(map(_escaped, part))} |",
                    "|---|---:|" + ":---:|" * len(part),
                ]
                for name, by in rows.items():
                    cells = [self.cell(policy, **by) for policy in part]
                    told = [f"{self.shown(cell.mean)} ({self.shown_interval(cell)})" for cell in cells]
                    lines.append(f"| {_escaped(name) if by else '**mean**'} | {cells[0].n} | {' | '.join(told)} |")
        return "\n".join(lines)

    def sections(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Tables that samples fall apart into: by its title each one's rows, and what `cell` takes for them."""
        made: dict[str, dict[str, dict[str, Any]]] = {}
        if len(self.groups) > 1:
            made["group"] = {**{group: {"group": group} for group in self.groups}, "mean": {}}
        if self.lengths:
            made["length"] = {**{f"{length:,}": {"length": length} for length in self.lengths}, "mean": {}}
        return made

    @property
    def title(self) -> str:
        """What was run, in a line."""
        run = self.run
        said = [run.model, "question-agnostic" if run.agnostic else "", "no chat template" if run.raw else ""]
        part = "" if run.shard is None else f"shard {run.shard[0]} of {run.shard[1]}"
        return ", ".join(filter(None, [f"{run.task}: {run.samples} samples", *said, part]))

    @property
    def scale(self) -> str:
        """What scores are given in, and which way is better."""
        return f"score, {self.run.unit}, {'higher' if self.run.higher else 'lower'} is better"

    def shown(self, score: float | None) -> str:
        """A score as tables have it."""
        return number(score, 1, 0.01) if self.run.unit == "%" else number(score, 4)

    def shown_interval(self, cell: Cell) -> str:
        """A cell's interval as tables have it."""
        return "-" if cell.low is None else f"{self.shown(cell.low)} to {self.shown(cell.high)}"

    def blocks(self) -> list[list[str]]:
        """Policies that stand beside one another in a table: those of one budget, each time with those of none."""
        budgets = list(dict.fromkeys(b for b in map(_budget, self.policies) if b))
        free = [policy for policy in self.policies if not _budget(policy)]
        return [free + [each for each in self.policies if _budget(each) == budget] for budget in budgets] or [free]


def _budget(policy: str) -> str:
    return policy.rpartition("@")[2] if "@" in policy else ""


def _mean(records: Sequence[Record], name: str) -> float | None:
    known = [value for value in (getattr(record, name) for record in records) if value is not None]
    return None if len(known) < len(records) else float(np.mean(known))


def number(value: float | int | None, digits: int, unit: float = 1.0) -> str:
    """A number as tables have it.

    Args:
        value: any; None for one that is not known.
        digits: behind the point.
        unit: what it is counted in.

    Returns:
        The number with commas between thousands, or a dash.
    """
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _escaped(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|")
