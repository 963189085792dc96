"""Results of planning: `Plan` for GPUs and `MachinePlan` for a process here, as text, table or JSON."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxkv._values import brief
from jaxkv.planning.compiled import CompiledPlan
from jaxkv.planning.outlook import Outlook
from jaxkv.planning.process import Process
from jaxkv.planning.setting import HostSetting, Request, Setting
from jaxkv.planning.sizes import CacheParts, Sizes
from jaxkv.planning.speed import Speed
from jaxkv.policies.policy import Method


def gigabytes(size: int) -> str:
    """Number of bytes as text in decimal gigabytes, as data sheets count; in megabytes below 0.1 GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def policy_name(policy: Method) -> str:
    """Short text of a policy: its class, its budget and its other non-default fields."""
    shown, inner = brief(policy), policy
    while isinstance(below := getattr(inner, "inner", None), Method):
        inner = below
    budget, name = inner.parts().budget, type(inner).__name__
    if budget is None or "budget=" in shown:
        return shown
    if f"{name}(" not in shown:
        # A wrapper without a base policy wraps its default one, whose name is not shown.
        name = type(policy).__name__
    return shown.replace(f"{name}(", f"{name}(budget={budget!r}, ", 1).replace(", )", ")", 1)


def title(setting: Setting) -> str:
    """One line of text: model name, dtype, number and kind of GPUs, and how the model is split over them."""
    split = f"split over {setting.split}" if setting.split > 1 else "not split"
    groups = f" in each of {setting.data} groups" if setting.data > 1 else ""
    return (
        f"{setting.model}, {setting.dtype}, on {setting.gpus} x {setting.gpu.name}: {split}{groups}"
    )


def machine_title(setting: HostSetting) -> str:
    """Makes one line of text: model name, dtype and the words "in a process on this machine's CPU"."""
    return f"{setting.model}, {setting.dtype}, in a process on this machine's CPU"


def prompts(request: Request) -> str:
    """Text on a request's prompts, such as `2 prompts of 4,096 tokens, 256 new tokens each`."""
    asked = f", each asked {request.questions:,} times" if request.questions > 1 else ""
    return f"{_count_of_prompts(request)} of {request.context:,} tokens{asked}, {request.new:,} new tokens each"


def _count_of_prompts(request: Request) -> str:
    """Number of a request's prompts as text, such as `1 prompt` or `8 prompts`."""
    return f"{request.batch} prompt{'s' * (request.batch > 1)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """A changed setting that fits into memory: text that describes it (`about`), the `setting`, peak bytes of a GPU."""

    about: str
    setting: Setting
    peak: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of `plan` for GPUs: bytes of one GPU (`sizes`), whether they fit, the largest batch and context, speed.

    Attributes:
        setting: the checked request.
        sizes: bytes by arithmetic.
        largest_batch: largest number of prompts of this length that fit; 0 where none does.
        largest_context: largest number of tokens that so many prompts can have each; 0 where none fits.
        remedies: changed settings that fit, if this one does not.
        outlook: speed and requests an hour, estimates with rates of one H200; when compression pays; quality.
        notes: assumptions.
        compiled: figures of XLA's compiler; None without `compile`.
    """

    setting: Setting
    sizes: Sizes
    largest_batch: int
    largest_context: int
    remedies: tuple[Remedy, ...] = ()
    outlook: Outlook = Outlook()
    notes: tuple[str, ...] = ()
    compiled: CompiledPlan | None = None

    @property
    def speed(self) -> Speed | None:
        """Estimated `Speed` of decode and prefill; None if memory is too small, or rows are offloaded or decoded."""
        return self.outlook.speed

    @property
    def weights(self) -> int:
        """Bytes of the parameters that one GPU holds."""
        return self.sizes.weights

    @property
    def cache(self) -> int:
        """Bytes of one GPU's part of the compressed cache at the end of the answer, policy state included."""
        return self.sizes.grown

    @property
    def prefill_peak(self) -> int:
        """Peak bytes of one GPU during prefill: weights, cache and activations."""
        return self.sizes.prefill_peak

    @property
    def decode_peak(self) -> int:
        """Peak bytes of one GPU during decoding: weights, cache and activations."""
        return self.sizes.decode_peak

    @property
    def host(self) -> int:
        """Bytes of host memory that hold the offloaded rows of one GPU."""
        return self.sizes.host

    @property
    def fits(self) -> bool:
        """True if the peak of prefill and decoding is within one GPU's memory."""
        return self.sizes.peak <= self.setting.memory

    def __str__(self) -> str:
        """Report of a plan for GPUs as text, as `jaxkv plan` prints it."""
        setting, sizes, memory = self.setting, self.sizes, gigabytes(self.setting.memory)
        rows = f"{sizes.kept:,.0f} of {setting.context:,} rows a head; uncompressed {gigabytes(sizes.full)}"
        facts = [
            ("weights", sizes.weights, ""),
            ("cache", sizes.grown, rows),
            *_parts(sizes.parts),
            (
                "activations",
                sizes.prefill,
                f"of prefill; {gigabytes(sizes.decode)} of a decode step",
            ),
            *_waiting(sizes.waiting),
            (
                "peak of prefill",
                sizes.prefill_peak,
                f"{_share(sizes.prefill_peak, setting.memory)} of {memory}",
            ),
            (
                "peak of decode",
                sizes.decode_peak,
                f"{_share(sizes.decode_peak, setting.memory)} of {memory}",
            ),
        ]
        if sizes.host:
            facts.append(("in host memory", sizes.host, f"on a {setting.gpu.word}'s behalf"))
        verdict = self._verdict()
        limit = (
            " (the model's own limit)"
            if self.largest_context == setting.config.max_positions
            else ""
        )
        lines = [
            *_head(title(setting), self, facts),
            f"{verdict[0].upper()}{verdict[1:]}.",
            _largest(self, limit),
        ]
        lines += [f"  would fit: {each.about} ({gigabytes(each.peak)})" for each in self.remedies]
        if not self.fits and not self.remedies:
            tried = f"a smaller budget, another policy, up to 16 times the {setting.gpu.word}s"
            lines.append(f"  nothing that was tried would fit: {tried}")
        lines += self.outlook.lines("Estimated, with rates of one H200")
        lines += [
            *notes([self]),
            *([""] if self.compiled is not None else []),
            *self.compiled_lines(),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line of text: model, GPUs, and whether the plan fits."""
        return f"Plan({title(self.setting)}: {self._verdict()})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Prints the plan's report to IPython's pretty printer, for notebooks."""
        printer.text(str(self))

    def _verdict(self) -> str:
        """Sentence as text: fits, with bytes to spare on each GPU; or not, with the bytes prefill or decode needs."""
        peak, memory, word = self.sizes.peak, self.setting.memory, self.setting.gpu.word
        if self.fits:
            return f"it fits, with {gigabytes(memory - peak)} of {gigabytes(memory)} to spare on each {word}"
        when = "prefill" if self.prefill_peak >= self.decode_peak else "decode"
        return (
            f"it does NOT fit: {when} needs {gigabytes(peak)} of {gigabytes(memory)} on each {word}"
        )

    def compiled_lines(self) -> list[str]:
        """Text lines with XLA's figures and their relative deviation from the arithmetic; none if not compiled."""
        compiled, weights = self.compiled, self.sizes.weights
        if compiled is None:
            return []
        lines = [str(compiled)]
        for name, ours, theirs in (
            ("prefill", self.prefill_peak, compiled.prefill.peak),
            ("decode", self.decode_peak, compiled.decode.peak),
        ):
            beside = (ours - weights) / max(1, theirs - weights) - 1
            both = f"{gigabytes(ours)} by arithmetic, {gigabytes(theirs)} by the compiler"
            lines.append(
                f"  {name}: {both}: off by {ours / theirs - 1:+.2%}, weights left out by {beside:+.2%}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Dict for JSON of the whole plan: request, sizes in bytes, whether it fits, remedies, speed, notes."""
        setting, sizes = self.setting, self.sizes
        found: dict[str, Any] = {
            "model": setting.model,
            "policy": policy_name(setting.policy),
            "gpu": setting.gpu.name,
            "gpus": setting.gpus,
            "mesh": {"data": setting.data, "model": setting.split},
            "batch": setting.batch,
            "context": setting.context,
            "new": setting.new,
            "questions": setting.questions,
            "dtype": setting.dtype,
            "memory_bytes": setting.memory,
            "weights_bytes": sizes.weights,
            "cache_bytes": sizes.grown,
            "uncompressed_bytes": sizes.full,
            "rows": sizes.kept,
            "prefill_activation_bytes": sizes.prefill,
            "decode_activation_bytes": sizes.decode,
            "prefill_peak_bytes": sizes.prefill_peak,
            "decode_peak_bytes": sizes.decode_peak,
            "host_bytes": sizes.host,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "largest_context": self.largest_context,
            "would_fit": [
                {"change": each.about, "peak_bytes": each.peak} for each in self.remedies
            ],
            "cache_parts_bytes": dataclasses.asdict(sizes.parts),
            "waiting_rows_bytes": sizes.waiting,
            **self.outlook.as_dict(),
            "notes": list(self.notes),
        }
        if self.compiled is not None:
            peaks = {
                f"{name}_peak_bytes": getattr(self.compiled, name).peak
                for name in ("prefill", "decode")
            }
            found["compiled"] = peaks | dataclasses.asdict(self.compiled)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """Result of `plan` for this machine's CPU: a process's bytes by part, the largest batch and context, speed.

    Attributes:
        setting: the checked request, with the bytes that are free now.
        process: the process' bytes by part.
        largest_batch: largest number of prompts of this length that fit; 0 where none does.
        largest_context: largest number of tokens that so many prompts can have each; 0 where none fits.
        outlook: speed and requests an hour by rates measured here; when compression pays; quality.
        notes: assumptions.
    """

    setting: HostSetting
    process: Process
    largest_batch: int
    largest_context: int
    outlook: Outlook = Outlook()
    notes: tuple[str, ...] = ()

    @property
    def speed(self) -> Speed | None:
        """Estimated `Speed` of decode and prefill; None if memory is too small, or rows are offloaded or decoded."""
        return self.outlook.speed

    @property
    def free(self) -> int | None:
        """Bytes of memory that are free on this machine; None if the system does not say."""
        return self.setting.memory

    @property
    def fits(self) -> bool:
        """True if a first run, which compiles, fits into free memory, or if the free memory is unknown."""
        return self.setting.memory is None or self.process.first_peak <= self.setting.memory

    def __str__(self) -> str:
        """Report of a plan for this machine as text, as `jaxkv plan --gpus cpu` prints it."""
        made, free = self.process, self.setting.memory
        facts = [
            (
                "Python and JAX",
                made.started + made.left,
                "with the tokenizer, and what loading leaves",
            ),
            ("weights", made.weights, f"{gigabytes(made.loading)} on top while they are loaded"),
            ("cache", made.cache, ""),
            *_parts(made.parts),
            ("activations", made.activations, "of prefill"),
            (
                "programs",
                made.programs,
                f"{gigabytes(made.compiling)} on top in a first run, which compiles them",
            ),
        ]
        if made.waiting:
            facts.append(("waiting rows", made.waiting, "of layers whose rows are offloaded"))
        facts.append(("peak", made.peak, f"{gigabytes(made.first_peak)} in a first run"))
        verdict = "Nothing says how much memory this machine has free."
        if free is not None:
            verdict = (
                f"It {'fits' if self.fits else 'does NOT fit'}: {gigabytes(free)} are free now."
            )
        head = _head(machine_title(self.setting), self, facts)
        lines = [
            *head,
            verdict,
            _largest(self),
            *self.outlook.lines("Estimated from rates measured here"),
        ]
        return "\n".join([*lines, *notes([self])])

    def __repr__(self) -> str:
        """One line of text: model, policy and peak memory."""
        return f"MachinePlan({self.setting.model}, {policy_name(self.setting.policy)}: {gigabytes(self.process.peak)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Prints the plan's report to IPython's pretty printer, for notebooks."""
        printer.text(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Dict for JSON of the whole plan for this machine: request, sizes in bytes, whether it fits, speed, notes."""
        setting, made = self.setting, self.process
        return {
            **{
                name: getattr(setting, name)
                for name in ("model", "batch", "context", "new", "questions", "dtype")
            },
            "policy": policy_name(setting.policy),
            "gpu": "cpu",
            **{
                f"{name}_bytes": size
                for name, size in dataclasses.asdict(made).items()
                if name != "parts"
            },
            "cache_parts_bytes": dataclasses.asdict(made.parts),
            "peak_bytes": made.peak,
            "first_peak_bytes": made.first_peak,
            "free_bytes": setting.memory,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "largest_context": self.largest_context,
            **self.outlook.as_dict(),
            "notes": list(self.notes),
        }


def _parts(parts: CacheParts) -> list[tuple[str, int, str]]:
    """List of ("  of it", bytes, "for PURPOSE") for a report, one for each part in `CacheParts.beyond`."""
    return [("  of it", size, f"for {name}") for name, size in _named(parts)]


def _named(parts: CacheParts) -> list[tuple[str, int]]:
    """List of (purpose as text, bytes) of a cache's parts other than its budget's rows that take 1% or more."""
    return [("new tokens' room" if name == "room" else name, size) for name, size in parts.beyond]


def _waiting(size: int) -> list[tuple[str, int, str]]:
    """List of one (name, bytes, remark): all layers' uncompressed rows that prefill holds; empty if `size` is 0."""
    return (
        [("  of them", size, "uncompressed rows of all layers, until the last one is scored")]
        if size
        else []
    )


def _head(first: str, plan: Plan | MachinePlan, facts: Sequence[tuple[str, int, str]]) -> list[str]:
    """Text lines that begin a report: `first`, policy and prompts, then one per (name, bytes, remark) in `facts`."""
    sizes = [gigabytes(size) for _, size, _ in facts]
    width = max(map(len, sizes))
    lines = [first, f"{policy_name(plan.setting.policy)}: {prompts(plan.setting)}", ""]
    for (name, _, remark), size in zip(facts, sizes, strict=True):
        lines.append(f"  {name:<16} {size:>{width}}  {remark}".rstrip())
    return [*lines, ""]


def _share(size: int, memory: int) -> str:
    """Text with the share of memory that `size` bytes take, in per cent; never a round 100% of what does not fit."""
    text = f"{size / memory:.0%}"
    return "over 100%" if size > memory and text == "100%" else text


def _largest(plan: Plan | MachinePlan, limit: str = "") -> str:
    """Sentence as text with a plan's largest batch and longest context."""
    batch, context = (
        f"{each:,}" if each else "none" for each in (plan.largest_batch, plan.largest_context)
    )
    several = _count_of_prompts(plan.setting)
    return (
        f"Largest batch of such prompts: {batch}. Longest context of {several}: {context}{limit}."
    )


def notes(plans: Iterable[Plan | MachinePlan]) -> list[str]:
    """Text lines `Note: ...` of all plans' notes, each note once."""
    return [
        f"Note: {note}." for note in dict.fromkeys(note for each in plans for note in each.notes)
    ]
