"""What an evaluation is asked for: tasks and policies by name, made, or refused with what to give instead."""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import shortened
from jaxkv.evals.asking import QuestionTask, ids_of
from jaxkv.evals.records import dumped
from jaxkv.evals.task import TASKS, How, Sample, Task
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import POLICIES, as_policy, policy_class, takes_budget


def at_budgets(names: Iterable[str], budgets: Iterable[int | float] = ()) -> dict[str, Method]:
    """Rows of an evaluation: every named policy at every budget, such as "adakv@128"; one that has none once.

    Args:
        names: of registered policies.
        budgets: rows, or shares of each prompt.

    Returns:
        Policies by row.

    Raises:
        ValueError: for a name that is not known, offering the nearest; for a budget that a policy cannot honour.
        TypeError: for one name, or one budget, that is in no list.
    """
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: give a list of names")
    if isinstance(budgets, (str, int, float, np.generic)):
        raise TypeError(f"budgets={budgets!r}: give a list of budgets")
    budgets, made = list(budgets), {}
    for name in names:
        cls = policy_class(name)
        known = next(each for each, one in POLICIES.items() if one is cls)
        if not takes_budget(cls):
            made[known] = cls()
            continue
        require(bool(budgets), "budgets", None, f"{known} keeps a part of each prompt: say which, such as 128 or 0.2")
        for budget in budgets:
            try:
                made[f"{known}@{budget}"] = cls(budget=budget)
            except ValueError as error:
                raise ValueError(f"{known}@{budget}: {error}") from None
    require(bool(made), "policies", None, f"give some of {', '.join(POLICIES)}")
    return made


def as_task(task: Task | str) -> Task:
    """The task that somebody means.

    Args:
        task: a task; or the name of one, with its defaults.

    Returns:
        The task.

    Raises:
        ValueError: for a name that is not known; the message offers the nearest.
        TypeError: for anything else, and for a task whose settings must be given.
    """
    if isinstance(task, Task):
        return task
    if not isinstance(task, str):
        raise TypeError(f"task={type(task).__name__}: give a task such as TwoStage(count=100), or the name of one")
    near = difflib.get_close_matches(task, TASKS, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    require(task in TASKS, "task", task, f"no such task; known tasks: {', '.join(TASKS)}{meant}")
    return TASKS[task]()


def name_of(task: Task | type[Task]) -> str:
    """The name under which a task is known; its class' own, in lower case, for one that is not registered."""
    cls = task if isinstance(task, type) else type(task)
    return next((name for name, each in TASKS.items() if each is cls), cls.__name__.lower())


def described(task: type[Task]) -> str:
    """The first line of a task's docstring."""
    return shortened((task.__doc__ or "").strip().splitlines()[0] if task.__doc__ else "", 200)


def as_rows(params: LanguageModel, policies: Mapping[str, Any]) -> dict[str, Method]:
    """Policies by row, with what they take from the model filled in.

    Args:
        params: the model.
        policies: as `evaluate` is given them.

    Returns:
        The same, made.

    Raises:
        ValueError: for one that the model cannot honour.
        TypeError: for what is no mapping of policies.
    """
    if not isinstance(policies, Mapping):
        raise TypeError(f"policies={type(policies).__name__}: give them by name, {{'snapkv': SnapKV(budget=128)}}")
    require(bool(policies), "policies", {}, "give at least one")
    odd = [name for name in policies if not (isinstance(name, str) and name.strip() == name and name.isprintable())]
    require(not any(odd) and all(policies), "policies", odd, "rows have names of one line, such as 'adakv@128'")
    layers, found = params.config.layers, params.filter_layers
    return {
        name: as_policy(each, field=f"policies[{name!r}]").for_model(layers, found) for name, each in policies.items()
    }


def seed_of(seed: int, name: str) -> int:
    """A seed of something's own, the same wherever it is run.

    Args:
        seed: that was given.
        name: tells it from others: a sample's id.

    Returns:
        32 bits.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode("utf-8", "backslashreplace")).digest()[:4], "big")


def settings_of(task: Task) -> dict[str, Any]:
    """A task's fields, as JSON has them.

    Args:
        task: the task.

    Returns:
        By field.
    """
    return json.loads(dumped({field.name: getattr(task, field.name) for field in dataclasses.fields(task)}))


def require_how(task: Task, how: How) -> None:
    """Refuses what is no way to run, and to keep questions from a policy where there are none.

    Args:
        task: the task.
        how: the way.

    Raises:
        ValueError: naming the remedy.
        TypeError: for what is no `How`.
    """
    if not isinstance(how, How):
        raise TypeError(f"how={how!r}: give How(agnostic=True), say")
    require(task.asks or not how.agnostic, "agnostic", how.agnostic, f"{name_of(task)} asks nothing: leave it out")


def require_budgets(
    params: LanguageModel, task: Task, rows: Mapping[str, Method], samples: Sequence[Sample], how: How
) -> None:
    """Refuses shares that come out too small for some prompt, before hours have gone into the others."""
    shares = {name: policy for name, policy in rows.items() if isinstance(policy.parts().budget, float)}
    if not shares or not isinstance(task, QuestionTask):
        return
    lengths = []
    for sample in samples:
        context, question = ids_of(params.text, sample, raw=how.raw)
        lengths.append(len(context) + (0 if how.agnostic and question else len(question)))
    for name, policy in shares.items():
        parts, length = policy.parts(), np.asarray(lengths, np.int64)
        try:
            parts.budgets(length, parts.keep.counts(length))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
