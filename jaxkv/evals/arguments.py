"""Checks and converts arguments of `evaluate` and the command line: tasks and policies by name, budgets, settings."""

import difflib
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.evals.task import TASKS, How, Task
from jaxkv.loading import LanguageModel
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
    """
    budgets, rows = list(budgets), dict[str, Method]()
    for name in names:
        cls = policy_class(name)
        known = next(each for each, one in POLICIES.items() if one is cls)
        if not takes_budget(cls):
            rows[known] = cls()
            continue
        remedy = f"{known} keeps a part of each prompt: say which, such as 128 or 0.2"
        require(bool(budgets), "budgets", None, remedy)
        rows |= {f"{known}@{budget}": cls(budget=budget) for budget in budgets}
    return rows


def as_task(task: Task | str) -> Task:
    """Returns `task` itself, or the task of that name with default settings; ValueError if there is no such task."""
    if isinstance(task, Task):
        return task
    near = difflib.get_close_matches(str(task), TASKS, n=2)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    require(task in TASKS, "task", task, f"no such task; known tasks: {', '.join(TASKS)}{meant}")
    return TASKS[task]()


def name_of(task: Task) -> str:
    """Registered name of a task's class, given the task; its class name in lower case if it is not registered."""
    cls = type(task)
    return next((name for name, each in TASKS.items() if each is cls), cls.__name__.lower())


def as_rows(params: LanguageModel, policies: Mapping[str, Any]) -> dict[str, Method]:
    """Dict {row name: policy fitted to the model's layers} from policies, classes or names; raises for odd names."""
    if not isinstance(policies, Mapping):
        raise TypeError(
            f"policies={policies!r}: give them by name, {{'snapkv': SnapKV(budget=128)}}"
        )
    odd = [name for name in policies if not name.isprintable() or name != name.strip()]
    remedy = "give at least one, under names of one line, such as 'adakv@128'"
    require(bool(policies) and not odd and all(policies), "policies", [*policies], remedy)
    return {
        name: policy_for(
            each,
            field=f"policies[{name!r}]",
            config=params.config,
            filters=params.filter_layers,
            dtype=params.dtype,
        )
        for name, each in policies.items()
    }


def seed_of(seed: int, name: str) -> int:
    """32-bit int, a seed hashed from `seed` and a name such as a sample's id; the same in every process."""
    text = f"{seed} {name}".encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def require_how(task: Task, how: How) -> None:
    """Raises ValueError for a question-agnostic run of a task without questions."""
    fits = task.asks or not how.agnostic
    require(fits, "agnostic", how.agnostic, f"{name_of(task)} asks nothing: leave it out")
