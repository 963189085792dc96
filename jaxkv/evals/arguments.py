"""Checks and converts arguments of `evaluate` and the command line: tasks and policies by name, budgets, settings."""

import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import shortened
from jaxkv.evals.asking import QuestionTask, ids_of
from jaxkv.evals.records import as_json
from jaxkv.evals.task import TASKS, How, Sample, Task, must_be_given
from jaxkv.loading import LanguageModel
from jaxkv.policies.checks import Share
from jaxkv.policies.fitting import policy_for
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import POLICIES, policy_class, takes_budget


def at_budgets(
    names: Iterable[str], budgets: Iterable[int | float | str] = ()
) -> dict[str, Method]:
    """Dict {row name, such as "adakv@128": policy} of each named policy at each budget; once if it takes no budget.

    Args:
        names: names of registered policies.
        budgets: rows per kv head and layer, shares of each prompt, or bytes of a sequence's cache, such as "64MB".

    Returns:
        Policies by row.

    Raises:
        ValueError: for an unknown name, offering the nearest; for a budget that a policy cannot honour.
        TypeError: for one name or one budget instead of a list.
    """
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: give a list of names")
    if isinstance(budgets, (str, int, float, np.generic)):
        raise TypeError(f"budgets={budgets!r}: give a list of budgets")
    budgets, rows = list(budgets), dict[str, Method]()
    for name in names:
        cls = policy_class(name)
        known = next(each for each, one in POLICIES.items() if one is cls)
        if not takes_budget(cls):
            rows[known] = cls()
            continue
        require(
            bool(budgets),
            "budgets",
            None,
            f"{known} keeps a part of each prompt: say which, such as 128 or 0.2",
        )
        for budget in budgets:
            try:
                rows[f"{known}@{budget}"] = cls(budget=budget)
            except ValueError as error:
                raise ValueError(f"{known}@{budget}: {error}") from None
    require(bool(rows), "policies", None, f"give some of {', '.join(POLICIES)}")
    return rows


def as_task(task: Task | str) -> Task:
    """Returns `task` itself, or the task of that name with default settings; ValueError if there is no such task."""
    if isinstance(task, Task):
        return task
    if not isinstance(task, str):
        raise TypeError(
            f"task={type(task).__name__}: give a task such as TwoStage(count=100), or the name of one"
        )
    near = difflib.get_close_matches(task, TASKS, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    require(task in TASKS, "task", task, f"no such task; known tasks: {', '.join(TASKS)}{meant}")
    cls = TASKS[task]
    needed = [field.name for field in dataclasses.fields(cls) if must_be_given(field)]
    remedy = f"its settings {', '.join(needed)} have no default: give {cls.__name__}({', '.join(needed)}=...)"
    require(not needed, "task", task, remedy)
    return cls()


def name_of(task: Task) -> str:
    """Registered name of a task's class, given the task; its class name in lower case if it is not registered."""
    cls = type(task)
    return next((name for name, each in TASKS.items() if each is cls), cls.__name__.lower())


def described(task: type[Task]) -> str:
    """First line of a task's docstring, cut to 200 characters."""
    return shortened((task.__doc__ or "").strip().partition("\n")[0].rstrip(), 200)


def as_rows(params: LanguageModel, policies: Mapping[str, Any]) -> dict[str, Method]:
    """Dict {row name: policy fitted to the model's layers} from policies, classes or names; raises for odd names."""
    if not isinstance(policies, Mapping):
        raise TypeError(
            f"policies={type(policies).__name__}: give them by name, {{'snapkv': SnapKV(budget=128)}}"
        )
    require(bool(policies), "policies", {}, "give at least one")
    odd = [
        name
        for name in policies
        if not (isinstance(name, str) and name.strip() == name and name.isprintable())
    ]
    require(
        not any(odd) and all(policies),
        "policies",
        odd,
        "rows have names of one line, such as 'adakv@128'",
    )
    config, filters = params.config, params.filter_layers
    fields = {name: f"policies[{name!r}]" for name in policies}
    fitted = functools.partial(policy_for, config=config, filters=filters, dtype=params.dtype)
    return {name: fitted(each, field=fields[name]) for name, each in policies.items()}


def seed_of(seed: int, name: str) -> int:
    """32-bit int, a seed hashed from `seed` and a name such as a sample's id; the same in every process."""
    return int.from_bytes(
        hashlib.sha256(f"{seed} {name}".encode("utf-8", "backslashreplace")).digest()[:4], "big"
    )


def settings_of(task: Task) -> dict[str, Any]:
    """Dict of a task's fields as JSON values."""
    return {
        field.name: as_json(getattr(task, field.name), field.name)
        for field in dataclasses.fields(task)
    }


def require_how(task: Task, how: How) -> None:
    """Raises TypeError for an argument other than a `How`, ValueError for a question-agnostic run without questions."""
    if not isinstance(how, How):
        raise TypeError(f"how={how!r}: give How(agnostic=True), say")
    require(
        task.asks or not how.agnostic,
        "agnostic",
        how.agnostic,
        f"{name_of(task)} asks nothing: leave it out",
    )


def require_budgets(
    params: LanguageModel,
    task: Task,
    rows: Mapping[str, Method],
    samples: Sequence[Sample],
    how: How,
) -> None:
    """Raises ValueError if a budget given as a share of prompts is too small for one of a `QuestionTask`'s prompts."""
    shares = {
        name: policy.parts()
        for name, policy in rows.items()
        if isinstance(policy.composed.budget, Share)
    }
    if not shares or not isinstance(task, QuestionTask):
        return
    pairs = [ids_of(params.text, sample, raw=how.raw) for sample in samples]
    compressed = [
        len(context) + (0 if how.agnostic and question else len(question))
        for context, question in pairs
    ]
    lengths = np.asarray(compressed, np.int64)
    for name, parts in shares.items():
        try:
            parts.budgets(lengths, parts.keep.counts(lengths))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
