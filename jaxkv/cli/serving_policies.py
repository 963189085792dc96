"""Parses `--also` of `jaxkv serve`, and makes an engine for each policy over the same weights."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.cli.policy_rows import spelled
from jaxkv.loading import LanguageModel
from jaxkv.policies import Method
from jaxkv.policies.registry import policy_class, takes_budget
from jaxkv.serving import Engine
from jaxkv.serving.room import device_of, share_of_next


def further_policies(given: Iterable[str], first: Method) -> dict[str, Method]:
    """Dict from name to policy of all `--also` options; one without a budget gets the first policy's budget.

    A name is what was written, with "-" for what cannot stand in an address. ValueError for a policy given twice.
    """
    kept = first.composed.budget
    budget = None if kept is None else kept.given
    found: dict[str, Method] = {}
    for text in given:
        for each in spelled(text, "--also"):
            shared = not each.sized and takes_budget(policy_class(each.name))
            name = re.sub(r"[^A-Za-z0-9_.]+", "-", each.text).strip("-")
            require(name not in found, "--also", each.text, "it is given twice: leave one out")
            found[name] = each.policy(budget if shared else None)
    return found


@contextlib.contextmanager
def engines(
    params: LanguageModel,
    policies: Mapping[str, Method],
    *,
    folder: str | None,
    tick: Callable[[str], object] = lambda what: None,
    **options: Any,
) -> Iterator[dict[str, Engine]]:
    """Context manager that makes an `Engine` for each policy, yields them by model id, and closes all at its end.

    "auto" slots and documents of all engines share the memory. The first keeps its documents in `folder`, the others
    each in a folder inside it, called as what stands behind the ":" of its model id. `tick` is called
    before each part is compiled, with its name.
    """
    device, made = device_of(params), dict[str, Engine]()
    options |= {"precompile": False, "start": False}
    for policy in policies.values():
        # Nobody waits minutes for the error of a later one.
        Engine(params, policy=policy, memory_share=1 / len(policies), **options).close()
    with contextlib.ExitStack() as stack:
        for at, (name, policy) in enumerate(policies.items()):
            documents = [each.documents for each in made.values()]
            promised = sum(max(0, each.most_bytes - each.nbytes) for each in documents)
            share = share_of_next(len(policies) - at, promised=promised, device=device)
            own = None if folder is None else Path(folder) / (name.rpartition(":")[2] if at else "")
            engine = Engine(params, policy=policy, documents=own, memory_share=share, **options)
            made[name] = stack.enter_context(engine)
            engine.start(tick, name)
        yield made
