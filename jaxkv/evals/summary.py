"""Results of an evaluation: mean scores with intervals and costs, by policy and group, and tables of them."""

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxkv._errors import refusal, require
from jaxkv.evals.records import RAISED, Record, Run, read_record, read_run, whole_lines

# More lengths than these are the samples' own, not lengths that samples were made for.
_MOST_LENGTHS = 25
_Z = 1.959964  # of the normal distribution's middle 95%


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Mean score, its 95% interval, and mean cache costs of one policy over the samples of one group.

    Attributes:
        policy: the row's name, such as "adakv@128".
        group: samples that count together; "mean" for the mean of all groups, each of the same weight.
        n: number of samples.
        mean: mean score.
        low: lower end of the mean's 95% interval; None if it has none, as for one sample that is no share.
        high: its upper end.
        tokens: mean number of tokens of a prompt; None if the task does not count them.
        rows: mean number of rows kept of a prompt per kv head and layer; None if the task does not count them.
        nbytes: mean bytes of these rows, on the device or in host memory; None if the task does not count them.
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
    """Mean difference of two policies' scores on the same samples, its 95% interval, and counts of wins.

    Attributes:
        mean: mean of the differences; above 0 if the first policy has the higher scores.
        low: lower end of the mean's 95% interval; None for one sample.
        high: its upper end.
        above: number of samples at which the first policy has the higher score.
        below: number of samples at which the second policy has the higher score.
        n: number of samples.
    """

    mean: float
    low: float | None
    high: float | None
    above: int
    below: int
    n: int


def interval(scores: Float[np.ndarray, " n"], *, shares: bool = True) -> tuple[float, float] | None:
    """95% confidence interval (low, high) of the mean of independent scores; None for one score that is no share.

    Args:
        scores: the n scores.
        shares: True if scores lie in [0, 1], and so their mean.

    Returns:
        Lower and upper end: Wilson's interval where every share is 0 or 1, or all shares are equal, as wide as if they
        were; Student's otherwise. None for one score that is no share.

    Raises:
        ValueError: for no scores, and for shares outside [0, 1].

    References:
        Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    scores = np.asarray(scores, np.float64)
    require(
        scores.ndim == 1 and scores.size > 0,
        "scores",
        f"of shape {scores.shape}",
        "give a list of at least 1",
    )
    inside = not shares or bool(((scores >= 0) & (scores <= 1)).all())
    require(inside, "scores", scores.tolist(), "shares lie in [0, 1]: give shares=False for others")
    n, mean = len(scores), float(scores.mean())
    if shares and (np.isin(scores, (0.0, 1.0)).all() or (scores == scores[0]).all()):
        middle, width = (
            mean + _Z**2 / (2 * n),
            _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n * n)),
        )
        scale = 1 + _Z**2 / n
        return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)
    found = _student(scores)
    return found if found is None or not shares else (max(0.0, found[0]), min(1.0, found[1]))


def _student(values: Float[np.ndarray, " n"]) -> tuple[float, float] | None:
    """Student's 95% interval (low, high) of the mean; None for one value."""
    from scipy import special  # imported late: it takes longer than all of jaxkv's own files

    n, mean = len(values), float(values.mean())
    if n == 1:
        return None
    width = float(special.stdtrit(n - 1, 0.975)) * float(values.std(ddof=1)) / math.sqrt(n)
    return mean - width, mean + width


def _of_differences(apart: Float[np.ndarray, " n"], *, shares: bool) -> tuple[float, float] | None:
    """95% interval (low, high) of a mean difference: Student's, or Wilson's if all differences of shares are equal."""
    n, first = len(apart), float(apart[0])
    if not shares or n == 1 or (apart != first).any():
        return _student(apart)
    # Wilson's upper end for 0 of n samples that differ: the others lie in [-1, 1].
    others = _Z**2 / (n + _Z**2)
    return first - others * (1 + first), first + others * (1 - first)


def _of_mean(
    means: Sequence[float], ends: Sequence[tuple[float, float] | None]
) -> tuple[float, float] | None:
    """95% interval (low, high) of the mean of independent means, from their intervals (MOVER); None if one has none."""
    known = [each for each in ends if each is not None]
    if len(known) < len(ends):
        return None
    middle, count = sum(means) / len(means), len(means)
    down = (
        math.sqrt(sum((mean - low) ** 2 for mean, (low, _) in zip(means, known, strict=True)))
        / count
    )
    up = (
        math.sqrt(sum((high - mean) ** 2 for mean, (_, high) in zip(means, known, strict=True)))
        / count
    )
    return middle - down, middle + up


def _by_group(records: Sequence[Record], values: Sequence[float]) -> list[Float[np.ndarray, " _"]]:
    """List of arrays, one per group: `values`, of which each record has one, split by the records' groups."""
    groups: dict[str, list[float]] = {}
    for record, value in zip(records, values, strict=True):
        groups.setdefault(record.group, []).append(value)
    return [np.asarray(each, np.float64) for each in groups.values()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Finished evaluation of a task, or of one shard: its folder, run and records, with mean scores and tables.

    Attributes:
        folder: the folder of its files.
        run: its settings.
        records: outcome of every sample under every policy.
    """

    folder: Path
    run: Run
    records: tuple[Record, ...] = dataclasses.field(repr=False)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Evaluation":
        """Reads a finished evaluation from the folder that `jaxkv.evaluate` or `jaxkv eval` wrote; else ValueError.

        Args:
            folder: the folder that was given as `out`.

        Returns:
            The evaluation.

        Raises:
            ValueError: if the folder holds no evaluation, or an unfinished one.
            TypeError: for a folder that is no path.
        """
        found = cls.begun(folder)
        run, records = found.run, found.records
        if len(records) != run.lines:
            remedy = "run the same command again, and it goes on from there"
            raise ValueError(
                f"{folder} holds {len(records)} of the evaluation's {run.lines} lines: {remedy}"
            )
        ids = [record.id for record in records[: len(records) // len(run.policies)]]
        expected = [(name, each) for name in run.policies for each in ids]
        for record, (name, each) in zip(records, expected, strict=True):
            remedy = "they are not those of the others: the file was changed; remove them and those behind them, and "
            same = (record.policy, record.id) == (name, each)
            require(
                same, "folder", f"{folder}, lines of {name}", remedy + "run the same command again"
            )
        return found

    @classmethod
    def begun(cls, folder: str | os.PathLike[str], field: str = "folder") -> "Evaluation":
        """Reads an evaluation, finished or not, with the records of its complete lines; ValueError if there is none.

        Args:
            folder: the folder that was given as `out`.
            field: name of the argument in errors.

        Returns:
            The evaluation with the records of its complete lines.

        Raises:
            ValueError: if the folder holds no evaluation.
            TypeError: for a folder that is no path.
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"{field}={folder!r}: give the folder of an evaluation")
        path = Path(os.path.expanduser(folder))
        try:
            run, lines = read_run(path), whole_lines(path)
        except NotADirectoryError:
            run, lines = None, []
        if run is None:
            raise refusal(field, str(folder), "no evaluation lies there: give what --out was")
        records = [
            read_record(line, f"{path}, line {at}") for at, line in enumerate(lines, start=1)
        ]
        return cls(folder=path, run=run, records=tuple(records))

    @property
    def policies(self) -> tuple[str, ...]:
        """Tuple of the names of the table's rows, such as "adakv@128", in order."""
        return tuple(self.run.policies)

    @functools.cached_property
    def groups(self) -> tuple[str, ...]:
        """Tuple of the distinct names of the records' groups, in the order in which they first occur."""
        return tuple(dict.fromkeys(record.group for record in self.records))

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Ascending tuple of distinct prompt lengths (tag "length"); empty if any is missing, or not 2 to 25."""
        given: list[Any] = [record.tags.get("length") for record in self.records]
        found = sorted(set(given)) if all(isinstance(each, int) for each in given) else []
        return tuple(found) if 1 < len(found) <= _MOST_LENGTHS else ()

    @functools.cached_property
    def _by(self) -> dict[str, list[Record]]:
        """Dict {policy's row name: list of its records}."""
        by: dict[str, list[Record]] = collections.defaultdict(list)
        for record in self.records:
            by[record.policy].append(record)
        return by

    def of(self, policy: str, group: str | None = None, **tags: Any) -> list[Record]:
        """List of one policy's records, in the order of the samples; optionally of one group, or with given tags.

        Args:
            policy: name of a row.
            group: only records of this group; of all groups by default.
            **tags: only records with these tags, such as `length=4096`.

        Returns:
            The records.

        Raises:
            ValueError: for an unknown row or group, and for tags that no sample has.
        """
        require(policy in self.policies, "policy", policy, f"there are {', '.join(self.policies)}")
        require(
            group is None or group in self.groups,
            "group",
            group,
            f"there are {', '.join(self.groups)}",
        )
        found = [record for record in self._by[policy] if group is None or record.group == group]
        for name, value in tags.items():
            found = [
                record for record in found if name in record.tags and record.tags[name] == value
            ]
            require(bool(found), name, value, "no sample has this tag")
        return found

    def scores(self, policy: str, group: str | None = None, **tags: Any) -> Float[np.ndarray, " n"]:
        """Array of one policy's scores, one per sample in order, filtered by group and tags."""
        return np.asarray([record.score for record in self.of(policy, group, **tags)], np.float64)

    def cell(self, policy: str, group: str | None = None, **tags: Any) -> Cell:
        """`Cell` of one policy: its mean score with a 95% interval, and mean tokens, rows and bytes.

        Args:
            policy: name of a row.
            group: only samples of this group; by default the mean of all groups, each of the same weight.
            **tags: only samples with these tags, such as `length=4096`.

        Returns:
            The cell.

        Raises:
            ValueError: for an unknown row or group, and for tags that no sample has.
        """
        records, shares = self.of(policy, group, **tags), self.run.unit == "%"
        parts = _by_group(records, [record.score for record in records])
        means = [float(part.mean()) for part in parts]
        low, high = _of_mean(means, [interval(part, shares=shares) for part in parts]) or (
            None,
            None,
        )
        return Cell(
            policy=policy,
            group="mean" if group is None else group,
            n=len(records),
            mean=sum(means) / len(means),
            low=low,
            high=high,
            tokens=_mean(record.tokens for record in records),
            rows=_mean(record.rows for record in records),
            nbytes=_mean(record.nbytes for record in records),
        )

    def difference(self, first: str, second: str, group: str | None = None) -> Difference:
        """`Difference` of two policies' scores on the same samples, first minus second: mean, interval, wins.

        Args:
            first: name of a row.
            second: name of another row.
            group: only samples of this group; by default the mean of all groups, each of the same weight, as in `cell`.

        Returns:
            The difference, first minus second.

        Raises:
            ValueError: for an unknown row or group.
        """
        ones, others = self.of(first, group), self.of(second, group)
        parts = _by_group(
            ones, [one.score - other.score for one, other in zip(ones, others, strict=True)]
        )
        means, shares = [float(part.mean()) for part in parts], self.run.unit == "%"
        low, high = _of_mean(means, [_of_differences(part, shares=shares) for part in parts]) or (
            None,
            None,
        )
        apart = np.concatenate(parts)
        above, below = int((apart > 0).sum()), int((apart < 0).sum())
        return Difference(
            mean=sum(means) / len(means), low=low, high=high, above=above, below=below, n=len(apart)
        )

    def as_dict(self) -> dict[str, Any]:
        """Dict of JSON values: the run, and a cell for each policy and group and each policy's mean."""
        cells = [
            self.cell(policy, group) for policy in self.policies for group in (*self.groups, None)
        ]
        return {"run": self.run.as_dict(), "cells": [dataclasses.asdict(cell) for cell in cells]}

    def table(self) -> str:
        """Text of Markdown tables: score and costs of each policy, then scores by group and by length."""
        head = f"| policy | {self.scale} | 95% interval | n | rows kept | MB | prompt tokens |"
        lines = [f"# {self.title}", "", head, "|---|---:|:---:|---:|---:|---:|---:|"]
        for policy in self.policies:
            cell = self.cell(policy)
            costs = [number(cell.rows, 1), number(cell.nbytes, 3, 1e6), number(cell.tokens, 0)]
            row = [policy, self.shown(cell.mean), self.shown_interval(cell), str(cell.n), *costs]
            lines.append(f"| {' | '.join(map(_escaped, row))} |")
        lines += ["", self.raised] if self.raised else []
        for kind, rows in self.sections().items():
            for block in self.blocks():
                lines += ["", f"| {kind} | n | {' | '.join(map(_escaped, block))} |"]
                lines.append("|---|---:|" + ":---:|" * len(block))
                for name, filters in rows.items():
                    cells = [self.cell(policy, **filters) for policy in block]
                    scores = [
                        f"{self.shown(cell.mean)} ({self.shown_interval(cell)})" for cell in cells
                    ]
                    label = _escaped(name) if filters else "**mean**"
                    lines.append(f"| {label} | {cells[0].n} | {' | '.join(scores)} |")
        return "\n".join(lines)

    def sections(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Dict {"group" or "length": {row label: keyword arguments of `cell`}}, the rows of the score tables."""
        tables: dict[str, dict[str, dict[str, Any]]] = {}
        if len(self.groups) > 1:
            tables["group"] = {**{group: {"group": group} for group in self.groups}, "mean": {}}
        if self.lengths:
            tables["length"] = {
                **{f"{length:,}": {"length": length} for length in self.lengths},
                "mean": {},
            }
        return tables

    @property
    def raised(self) -> str:
        """One line of text: per policy, number of samples whose budget was raised to sinks and window; "" for none."""
        counts = {
            policy: sum(RAISED in each.figures for each in self.of(policy))
            for policy in self.policies
        }
        told = ", ".join(f"{policy} {count}" for policy, count in counts.items() if count)
        about = "Samples so short that their budget, a share, was raised to what must stay (sinks, window)"
        return told and f"{about}: {told}."

    @property
    def nothing(self) -> str | None:
        """Warning that policies are not compared, as the full cache, or each row without one, scores 0; else None."""
        full = [name for name, policy in self.run.policies.items() if policy.startswith("FullKV(")]
        judged = full or self.policies
        if not self.run.higher or any(self.cell(name).mean for name in judged):
            return None
        return f"{', '.join(judged)} scored 0: this compares nothing; give a model that can do the task"

    @property
    def title(self) -> str:
        """One line of text: task, number of samples, model and settings."""
        run = self.run
        said = [
            run.model,
            "question-agnostic" if run.agnostic else "",
            "no chat template" if run.raw else "",
        ]
        part = "" if run.shard is None else f"shard {run.shard[0]} of {run.shard[1]}"
        return ", ".join(filter(None, [f"{run.task}: {run.samples} samples", *said, part]))

    @property
    def scale(self) -> str:
        """One line of text with the unit of the scores: "score, %, higher is better"."""
        return f"score, {self.run.unit}, {'higher' if self.run.higher else 'lower'} is better"

    def shown(self, score: float | None) -> str:
        """Score as text: percent without a sign if the unit is "%", else four decimals; a dash for None."""
        return number(score, 1, 0.01) if self.run.unit == "%" else number(score, 4)

    def shown_interval(self, cell: Cell) -> str:
        """A cell's 95% interval as text, "low to high"; a dash if it has none."""
        return "-" if cell.low is None else f"{self.shown(cell.low)} to {self.shown(cell.high)}"

    def blocks(self) -> list[list[str]]:
        """List of lists of row names, one per budget, as columns of score tables; rows without budget are in each."""
        budgets = list(dict.fromkeys(b for b in map(_budget, self.policies) if b))
        free = [policy for policy in self.policies if not _budget(policy)]
        return [
            free + [each for each in self.policies if _budget(each) == budget] for budget in budgets
        ] or [free]


def _budget(policy: str) -> str:
    """Budget in a row's name as text, such as "128" of "adakv@128"; empty if it has none."""
    return policy.rpartition("@")[2] if "@" in policy else ""


def _mean(values: Iterable[int | float | None]) -> float | None:
    """Mean of the values; None if any of them is None."""
    every = list(values)
    known = [value for value in every if value is not None]
    return None if len(known) < len(every) else float(np.mean(known))


def number(value: float | int | None, digits: int, unit: float = 1.0) -> str:
    """`value / unit` as text with `digits` decimals and commas between thousands; a dash for None."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _escaped(text: str) -> str:
    """Text in one line with "|" escaped, for a cell of a Markdown table."""
    return " ".join(text.splitlines()).replace("|", "\\|")
