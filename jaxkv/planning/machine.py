"""A plan for a process on this machine: what its memory peaks at."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv import memory
from jaxkv.planning.process import Process, process_of
from jaxkv.planning.search import largest, lengths_below
from jaxkv.planning.setting import Asked
from jaxkv.planning.table import aligned, gigabytes, policy_name, prompts_of

_MOST_BATCH = 1 << 12
_HEAD = ("policy", "cache", "peak", "first run", "fits", "largest batch", "largest context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """What a process of its own takes that loads a model here, on a CPU, and generates with it.

    Attributes:
        setting: what was asked.
        process: its parts, in bytes.
        free: what the machine has free now; None where nothing says so.
        largest_batch: prompts of this length that fit; 0 where none does.
        largest_context: tokens that so many prompts can have each; 0 where not even one fits.
        notes: what was assumed.
    """

    setting: Asked
    process: Process
    free: int | None
    largest_batch: int
    largest_context: int
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a first run fits into what is free."""
        return self.free is None or self.process.first_peak <= self.free

    def __str__(self) -> str:
        """What `jaxkv plan --gpus cpu` prints."""
        made, setting = self.process, self.setting
        facts = {
            "Python and JAX": (made.started + made.left, "with the tokenizer, and what loading leaves"),
            "weights": (made.weights, f"{gigabytes(made.loading)} on top while they are loaded"),
            "cache": (made.cache, ""),
            "activations": (made.activations, "of prefill"),
            "programs": (made.programs, f"{gigabytes(made.compiling)} on top in a first run, which compiles them"),
            "waiting rows": (made.waiting, "of layers whose rows are offloaded") if made.waiting else None,
            "peak": (made.peak, f"{gigabytes(made.first_peak)} in a first run"),
        }
        told = {name: (gigabytes(fact[0]), fact[1]) for name, fact in facts.items() if fact is not None}
        width = max(len(size) for size, _ in told.values())
        lines = [f"{setting.model}, {setting.dtype}, in a process on this machine's CPU"]
        lines += [f"{policy_name(setting.policy)}: {prompts_of(setting)}", ""]
        lines += [f"  {name:<16} {size:>{width}}  {about}".rstrip() for name, (size, about) in told.items()]
        of = f"{setting.batch} prompt{'s' * (setting.batch > 1)}"
        batch, context = (f"{each:,}" if each else "none" for each in (self.largest_batch, self.largest_context))
        lines += ["", self._verdict(), f"Largest batch of such prompts: {batch}. Longest context of {of}: {context}."]
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])

    def _verdict(self) -> str:
        if self.free is None:
            return "Nothing says how much memory this machine has free."
        return f"It {'fits' if self.fits else 'does NOT fit'}: {gigabytes(self.free)} are free now."

    def __repr__(self) -> str:
        """One line."""
        return f"MachinePlan({self.setting.model}, {policy_name(self.setting.policy)}: {gigabytes(self.process.peak)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook, the text."""
        printer.text(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can have it; sizes in bytes."""
        setting, made = self.setting, self.process
        asked = {name: getattr(setting, name) for name in ("model", "batch", "context", "new", "dtype")}
        sizes = {f"{name}_bytes": size for name, size in dataclasses.asdict(made).items()}
        sizes |= {"peak_bytes": made.peak, "first_peak_bytes": made.first_peak, "free_bytes": self.free}
        found = {"fits": self.fits, "largest_batch": self.largest_batch, "largest_context": self.largest_context}
        return {
            **asked,
            "policy": policy_name(setting.policy),
            "gpu": "cpu",
            **sizes,
            **found,
            "notes": list(self.notes),
        }


def machine_planned(asked: Asked, notes: tuple[str, ...] = ()) -> MachinePlan:
    """The plan of a process here.

    Args:
        asked: what it is to do.
        notes: what that assumes.

    Returns:
        The plan.
    """
    free = memory.machine_bytes()

    def fits(**changed: Any) -> bool:
        try:
            return free is None or _process(dataclasses.replace(asked, **changed)).first_peak <= free
        except ValueError:
            return False

    return MachinePlan(
        setting=asked,
        process=_process(asked),
        free=free,
        largest_batch=largest(lambda batch: fits(batch=batch), _MOST_BATCH),
        largest_context=next((n for n in lengths_below(asked.config.max_positions) if fits(context=n)), 0),
        notes=notes,
    )


def _process(asked: Asked) -> Process:
    sizes: dict[str, Any] = {name: getattr(asked, name) for name in ("batch", "context", "new", "dtype")}
    return process_of(asked.config, asked.policy, **sizes)


def compared_here(plans: Sequence[MachinePlan]) -> str:
    """Several policies in a process each, a row for each.

    Args:
        plans: one after the other.

    Returns:
        The table.
    """
    first, rows = plans[0].setting, list[tuple[str, ...]]([_HEAD])
    for plan in plans:
        sizes = (plan.process.cache, plan.process.peak, plan.process.first_peak)
        most = (f"{plan.largest_batch:,}", f"{plan.largest_context:,}")
        rows.append((policy_name(plan.setting.policy), *map(gigabytes, sizes), "yes" if plan.fits else "NO", *most))
    lines = [f"{first.model}, {first.dtype}, in a process on this machine's CPU", prompts_of(first), ""]
    notes = dict.fromkeys(note for each in plans for note in each.notes)
    return "\n".join([*lines, *aligned(rows), *(f"Note: {note}." for note in notes)])
