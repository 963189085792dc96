"""Result of planning: `Plan`, as text or JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxkv._checks import format_non_default_fields, format_number
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.planning.compiled import CompiledPlan
from jaxkv.planning.memory_sizes import MemorySizes, count_parameters
from jaxkv.planning.setting import Workload
from jaxkv.planning.speed import ASSUMED, Speed
from jaxkv.policies.policy import Policy


def format_gigabytes(size: int) -> str:
    """Return bytes as text in decimal gigabytes, as data sheets do; in megabytes below 0.1 GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def format_policy(policy: Policy) -> str:
    """Return a policy as short text: its class, its budget and its other non-default fields."""
    shown = format_non_default_fields(policy)
    inner = policy
    while isinstance(below := getattr(inner, "base_policy", None), Policy):
        inner = below
    budget = inner.composed.budget
    name = type(inner).__name__
    if budget is None or "budget=" in shown:
        return shown
    if f"{name}(" not in shown:
        # A wrapper without a base policy wraps its default one, whose name is not shown.
        name = type(policy).__name__
    return shown.replace(f"{name}(", f"{name}(budget={budget!r}, ", 1).replace(", )", ")", 1)


def format_plan_title(setting: Workload) -> str:
    """Return a plan's title line: model, dtype, number and kind of devices, and how the model is sharded."""
    split = f"split over {setting.gpus_per_group}" if setting.gpus_per_group > 1 else "not split"
    groups = f" in each of {setting.data} groups" if setting.data > 1 else ""
    where = f"{setting.gpus} x {setting.gpu.name}: {split}{groups}"
    return f"{setting.model}, {setting.dtype}, on {where}"


def format_prompts(setting: Workload) -> str:
    """Return a workload's prompts as text, such as `2 prompts of 4,096 tokens, 256 new tokens each`."""
    asked = f", {setting.questions:,} questions each" if setting.questions > 1 else ""
    several = f"{setting.batch} prompt{'s' * (setting.batch > 1)}"
    return f"{several} of {setting.context:,} tokens{asked}, {setting.new:,} new tokens each"


@frozen_dataclass
class Remedy:
    """A changed workload that fits into memory: the change as text (`about`), the `setting`, peak bytes of a device."""

    about: str
    setting: Workload
    peak: int


@frozen_dataclass
class ServingPlan:
    """Plan of a serving engine: the number of slots that fit, bytes per slot, requests per hour, longest pause.

    Attributes:
        slots: largest number of slots that fit on all devices; 0 if none does.
        slot_bytes: bytes of a slot on one device.
        requests: requests per hour; None without slots or a speed.
        pause: longest time in seconds between two tokens while prompts arrive: prefill of two layers and a step; None
            without slots or a speed.
    """

    slots: int
    slot_bytes: int
    requests: float | None = None
    pause: float | None = None

    def __str__(self) -> str:
        """A serving plan in one line: number and size of slots; if estimated, requests/hour, longest pause."""
        text = f"served: {self.slots:,} slots of {format_gigabytes(self.slot_bytes)} fit"
        if self.requests is not None and self.pause is not None:
            text += f", {format_number(self.requests)} requests per hour; longest pause {format_number(self.pause)} s"
        return text


@frozen_dataclass
class Plan:
    """Result of `plan`: memory sizes of one device, largest batch and context, remedies, estimated speeds, notes.

    Attributes:
        setting: the validated workload.
        sizes: bytes by arithmetic.
        largest_batch: largest number of prompts of this length that fit; 0 if none does.
        largest_context: largest number of tokens per prompt for this batch; 0 if none fits.
        remedies: changed settings that fit, if this one does not.
        speed: speed of the batch; None if it does not fit, or no rate was measured.
        fastest: speed of the largest batch that fits; None without one, or without a rate.
        silent: why there is no speed, as text; empty if there is one.
        served: slots of an engine, or why an engine does not support the policy; None if not planned.
        notes: assumptions.
        compiled: figures of XLA's compiler; None without `compile`.
    """

    setting: Workload
    sizes: MemorySizes
    largest_batch: int
    largest_context: int
    remedies: tuple[Remedy, ...] = ()
    speed: Speed | None = None
    fastest: Speed | None = None
    silent: str = ""
    served: ServingPlan | str | None = None
    notes: tuple[str, ...] = ()
    compiled: CompiledPlan | None = None

    @property
    def parameters(self) -> int:
        """Number of the model's parameters on all devices, as its files hold them."""
        return count_parameters(self.setting.config, self.setting.dtype)

    @property
    def weights(self) -> int:
        """Bytes of the model's parameters on one device."""
        return self.sizes.weights

    @property
    def cache(self) -> int:
        """Bytes of one device's shard of the compressed cache at its largest, at the end of the answer."""
        return self.sizes.grown

    @property
    def prefill_peak(self) -> int:
        """Peak bytes of one device during prefill: weights, cache, activations, and on a CPU the process."""
        return self.sizes.prefill_peak

    @property
    def decode_peak(self) -> int:
        """Peak bytes of one device during decoding: weights, largest cache, activations, and on a CPU the process."""
        return self.sizes.decode_peak

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the entries that one device offloads."""
        return self.sizes.host

    @property
    def fits(self) -> bool:
        """True if the peak of prefill and decoding fits one device's memory."""
        return self.sizes.peak_device_bytes <= self.setting.gpu.memory

    def __str__(self) -> str:
        """Return a report as `jaxkv plan` prints it: memory, fit, limits, remedies, speed, slots, notes, compiler."""
        setting = self.setting
        sizes = self.sizes
        memory = format_gigabytes(setting.gpu.memory)
        read = f"a step reads {format_gigabytes(sizes.read)}" if setting.config.experts else ""
        word = setting.gpu.word
        rows = f"{sizes.kept:,.0f} of {setting.context:,} entries per kv head"
        lines = [
            format_plan_title(setting),
            f"{format_policy(setting.policy)}: {format_prompts(setting)}",
            "",
        ]
        for name, size, remark in (
            ("weights", sizes.weights, read),
            ("process", sizes.process, "Python, JAX and compiled programs"),
            ("cache", sizes.grown, f"{rows}; uncompressed {format_gigabytes(sizes.full)}"),
            (
                "activations",
                sizes.prefill,
                f"of prefill; {format_gigabytes(sizes.decode)} of a step",
            ),
            ("peak of prefill", sizes.prefill_peak, f"of {memory}"),
            ("peak of decode", sizes.decode_peak, f"of {memory}"),
            ("in host memory", sizes.host, f"for each {word}"),
        ):
            lines += (
                [f"  {name:<16} {format_gigabytes(size):>10}  {remark}".rstrip()] if size else []
            )
        spare = format_gigabytes(abs(setting.gpu.memory - sizes.peak_device_bytes))
        verdict = (
            f"It fits, with {spare} to spare"
            if self.fits
            else f"It does NOT fit: {spare} are missing"
        )
        batch, context = (
            f"{each:,}" if each else "none" for each in (self.largest_batch, self.largest_context)
        )
        if self.largest_context == setting.config.max_positions:
            context += " (the model's limit)"
        lines += ["", f"{verdict} on each {word}.", f"Largest batch of such prompts: {batch}."]
        lines.append(f"Longest context of this batch: {context}.")
        lines += [
            f"  would fit: {each.about} ({format_gigabytes(each.peak)})" for each in self.remedies
        ]
        if not self.fits and not self.remedies:
            lines.append("  no change that was tried would fit")
        lines.append(f"No estimate of speed: {self.silent}." if self.silent else "Estimated speed:")
        for each in dict.fromkeys(filter(None, (self.speed, self.fastest))):
            lines.append(f"  {each.batch:,} at a time: {each}")
        lines += [f"  {ASSUMED}"] if self.speed or self.fastest else []
        lines += [f"Not served: {self.served}"] if isinstance(self.served, str) else []
        lines += [f"  {self.served}"] if isinstance(self.served, ServingPlan) else []
        return "\n".join([*lines, *format_notes([self]), *self.format_compiled_figures()])

    def __repr__(self) -> str:
        """One line of text: model, dtype, GPUs, and whether the plan fits."""
        return f"Plan({format_plan_title(self.setting)}: {'it fits' if self.fits else 'it does NOT fit'})"

    def format_compiled_figures(self) -> list[str]:
        """List lines of XLA's figures, and how much the arithmetic deviates from them; none if not compiled."""
        compiled = self.compiled
        weights = self.sizes.weights
        if compiled is None:
            return []
        lines = ["", str(compiled)]
        for name, ours, theirs in (
            ("prefill", self.prefill_peak, compiled.prefill.peak_bytes),
            ("decode", self.decode_peak, compiled.decode.peak_bytes),
        ):
            beside = (ours - weights) / max(1, theirs - weights) - 1
            both = f"{format_gigabytes(ours)} by arithmetic, {format_gigabytes(theirs)} by the compiler"
            lines.append(
                f"  {name}: {both}: off by {ours / theirs - 1:+.2%}, without weights by {beside:+.2%}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of JSON values: workload, bytes, fit, remedies, speeds, notes; if set, `served`, `compiled`."""
        setting = self.setting
        sizes = self.sizes
        asked = ("model", "gpus", "batch", "context", "new", "questions", "dtype")
        found: dict[str, Any] = {
            **{name: getattr(setting, name) for name in asked},
            "policy": format_policy(setting.policy),
            "gpu": setting.gpu.name,
            "mesh": {"data": setting.data, "model": setting.gpus_per_group},
            "memory_bytes": setting.gpu.memory,
            "parameters": self.parameters,
            "weights_bytes": sizes.weights,
            "weights_read_bytes": sizes.read,
            "process_bytes": sizes.process,
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
            "speed": None if self.speed is None else self.speed.as_dict(),
            "speed_of_largest_batch": None if self.fastest is None else self.fastest.as_dict(),
            "notes": list(self.notes),
        }
        if self.served is not None:
            served = self.served
            found["served"] = None if isinstance(served, str) else dataclasses.asdict(served)
        if self.compiled is not None:
            peaks = {
                f"{name}_peak_bytes": getattr(self.compiled, name).peak_bytes
                for name in ("prefill", "decode")
            }
            found["compiled"] = peaks | dataclasses.asdict(self.compiled)
        return found


def format_notes(plans: Iterable[Plan]) -> list[str]:
    """List the notes of all plans as lines `Note: ...`, each note once."""
    found = dict.fromkeys(note for each in plans for note in each.notes)
    return [f"Note: {note}." for note in found]
