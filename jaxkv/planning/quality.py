"""Scores of a finished, or unfinished, evaluation beside a plan: `--quality FOLDER`."""

import dataclasses
import os
from collections.abc import Sequence

from jaxkv.planning.catalog import catalog
from jaxkv.planning.setting import Request
from jaxkv.policies.policy import Method

# A note is given where an evaluation's prompts are this many times shorter or longer than the plan's.
_OTHER_LENGTH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """Mean score of a policy in an evaluation: texts of score, interval and unit, number of samples, task and model.

    Attributes:
        row: the policy's row in the evaluation, such as "adakv@128".
        score: mean score as text, in `unit`.
        interval: its 95% interval as text.
        unit: "%", or another unit such as "nats".
        higher: True if a higher score is better.
        samples: number of samples that it is the mean of.
        of: number of samples of the task.
        task: name of the task.
        model: name of the model.
        mean: mean score as a number; shares in [0, 1].
        tokens: mean tokens of a prompt; None if the task does not count them.
    """

    row: str
    score: str
    interval: str
    unit: str
    higher: bool
    samples: int
    of: int
    task: str
    model: str
    mean: float
    tokens: float | None

    @property
    def word(self) -> str:
        """Text for a table: the score, with a star if samples are missing."""
        return self.score + "*" * (self.samples < self.of)

    def __str__(self) -> str:
        """One sentence of text: score and interval, and the task, samples, prompts and model measured."""
        some = (
            f"{self.samples:,} samples"
            if self.samples >= self.of
            else f"{self.samples:,} of {self.of:,} samples"
        )
        prompts = "" if self.tokens is None else f" of {self.tokens:,.0f} tokens on average"
        better = "higher" if self.higher else "lower"
        unit = "%" if self.unit == "%" else f" {self.unit}"
        score = f"{self.score}{unit} (95% interval {self.interval}; {better} is better)"
        return f"Quality: {score}, measured as {self.row} on {self.task}: {some}{prompts}, {self.model}"


def qualities(
    folder: str | os.PathLike[str] | None, settings: Sequence[Request], given: Sequence[Method]
) -> tuple[list[Quality | None], tuple[str, ...]]:
    """Reads an evaluation's `folder`; returns each setting's `Quality` (None if it has no score), and notes as texts.

    `given` are the policies as users wrote them; a setting's may have learned of the model since. An unfinished
    evaluation counts as far as it goes. Without a folder there is none. ValueError if the folder holds no evaluation.
    """
    if folder is None:
        return [None] * len(settings), ()
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"quality={folder!r}: give the folder of an evaluation")
    # Reading evaluations imports much that a plan without one does not need.
    from jaxkv.evals.results import Evaluation

    try:
        evaluation = Evaluation.read(folder)
    except ValueError as error:
        raise ValueError(str(error).replace("folder=", "quality=", 1)) from None
    run, methods = evaluation.run, evaluation.methods
    found, notes = list[Quality | None](), list[str]()
    for setting, policy in zip(settings, given, strict=True):
        texts = {repr(policy), repr(setting.policy)}
        row = next((name for name, text in methods.items() if text in texts), None)
        if row is None:
            found.append(None)
            continue
        cell = evaluation.cell(row)
        tokens = cell.tokens
        found.append(
            Quality(
                row=row,
                score=evaluation.shown(cell.mean),
                interval=evaluation.shown_interval(cell),
                unit=run.unit,
                higher=run.higher,
                samples=cell.n,
                of=run.samples,
                task=run.task,
                model=run.model,
                mean=cell.mean,
                tokens=tokens,
            )
        )
        if (
            tokens is not None
            and not 1 / _OTHER_LENGTH <= tokens / setting.context <= _OTHER_LENGTH
        ):
            notes.append(
                f"scores of {folder} are of prompts with {tokens:,.0f} tokens on average, the plan's have "
                f"{setting.context:,}: a budget in rows keeps another share of them"
            )
    if None in found:
        rows = ", ".join(methods) or "no samples yet"
        notes.append(
            f"where no score is shown, {folder} has none of this policy, budget and fields; it has {rows}"
        )
    if settings and not _same_model(run.model, settings[0].model):
        notes.append(f"scores of {folder} are of {run.model}, the plan is of {settings[0].model}")
    notes += [f"the evaluation of {folder}: {note}" for note in evaluation.notes]
    return found, tuple(dict.fromkeys(notes))


def _same_model(one: str, other: str) -> bool:
    """True if two names are equal, or spellings of one model of the catalogue."""
    return one == other or any({one, other} <= set(entry.spellings) for entry in catalog().values())
