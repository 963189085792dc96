"""Estimates an `Engine` of many slots for requests of one length: slots that fit, requests a second, longest pause."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxkv._values import amount
from jaxkv.engine.slot_shape import slot_shape
from jaxkv.planning.setting import HostSetting, Setting
from jaxkv.planning.speed import Speed
from jaxkv.serving.room import ahead_of, most_slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """Slots of a serving engine that fit, and estimated times under a constant stream of requests, None if unknown.

    Attributes:
        slots: largest number of slots that fit on all devices; 0 where none does.
        slot_bytes: bytes of a slot on one device.
        new: tokens that each request draws.
        prefill: seconds to prefill one prompt.
        questions: requests that each prompt answers, so that they share its prefill.
        step: seconds to draw one token in every slot.
        layers: layers of the model.
        auto: the most slots that an engine makes by itself, with slots="auto".
        price: of all devices for an hour; None if it is not given.
    """

    slots: int
    slot_bytes: int
    new: int
    prefill: float | None
    step: float | None
    layers: int
    auto: int
    questions: int = 1
    price: int | float | None = None

    @property
    def seconds(self) -> float | None:
        """Device seconds per request: shares of prefill and of all slots' steps; None without slots or speed."""
        if not self.slots or self.prefill is None or self.step is None:
            return None
        return self.prefill / self.questions + self.new * self.step / self.slots

    @property
    def requests(self) -> float | None:
        """Requests per second that all slots answer under a constant stream; None without slots or speed."""
        return None if not self.seconds else 1 / self.seconds

    @property
    def pause(self) -> float | None:
        """Most seconds between two tokens while prompts arrive: two layers' prefill and a step; None if unknown."""
        return (
            None
            if self.prefill is None or self.step is None
            else 2 * self.prefill / self.layers + self.step
        )

    @property
    def price_of_requests(self) -> float | None:
        """Price of a thousand requests; None without a price or a speed."""
        return (
            None
            if self.price is None or self.requests is None
            else 1e3 * self.price / (3600 * self.requests)
        )

    def as_dict(self) -> dict[str, Any]:
        """Dict for JSON: slots, bytes of one, requests and new tokens a second, longest pause, the price if given."""
        found: dict[str, Any] = {
            "slots": self.slots,
            "most_auto_slots": self.auto,
            "slot_bytes": self.slot_bytes,
            "requests_per_second": self.requests,
            "tokens_per_second": None if self.requests is None else self.requests * self.new,
            "longest_pause_seconds": self.pause,
        }
        return (
            found
            if self.price is None
            else found | {"price_per_thousand_requests": self.price_of_requests}
        )

    def __str__(self) -> str:
        """One line of text: slots, requests and new tokens a second, longest pause, price."""
        if not self.slots:
            return f"served: not one slot of {_megabytes(self.slot_bytes)} fits"
        text = f"served: {self.slots:,} slots of {_megabytes(self.slot_bytes)} fit"
        if self.slots > self.auto:
            text += f' (slots="auto" makes {self.auto})'
        if self.requests is not None and self.pause is not None:
            text += f", {amount(self.requests)} requests a second with {amount(self.requests * self.new)} new tokens"
            text += f"; longest pause {amount(self.pause)} s"
        if self.price_of_requests is not None:
            text += f"; a thousand cost {amount(self.price_of_requests)}"
        return text


def _megabytes(size: int) -> str:
    """Bytes as text in megabytes."""
    return f"{amount(size / 1e6)} MB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Size of a serving slot on one device: bytes (`nbytes`) that it takes for prompts of `setting`."""

    setting: Setting | HostSetting
    nbytes: int

    @classmethod
    def of(cls, setting: Setting | HostSetting) -> "Slot":
        """`Slot` for a setting's prompts, with its bytes computed; ValueError for policies that slots do not take."""
        parts, config = setting.policy.parts(), setting.config
        stretches = setting.mesh.shape["kv"] if isinstance(setting, Setting) else 1
        new = max(1, setting.new)
        shape = slot_shape(
            parts, config, prompt=setting.context, question=0, new=new, stretches=stretches
        )
        each = parts.row_bytes(config.head_dim, jnp.dtype(setting.dtype).itemsize)
        return cls(setting=setting, nbytes=sum(shape.rows) * each)

    def held(self, slots: int) -> int:
        """Bytes on a device of `slots` slots and of prompts prefilled ahead for all groups, each as big as a slot."""
        groups = self.setting.data if isinstance(self.setting, Setting) else 1
        # A prompt that waits takes the bytes of a slot in each group.
        return (slots + ahead_of(slots * groups)) * self.nbytes

    def served(
        self, slots: int, one: Speed | None, every: Speed | None, *, price: int | float | None
    ) -> Served:
        """Makes the `Served` of `slots` slots, by the speeds of one prompt and of a batch that fills all slots."""
        return Served(
            slots=slots,
            slot_bytes=self.nbytes,
            new=self.setting.new,
            questions=self.setting.questions,
            prefill=None if one is None else one.prefill,
            step=None if every is None else every.step,
            layers=self.setting.config.layers,
            auto=most_slots("gpu" if isinstance(self.setting, Setting) else "cpu"),
            price=price,
        )
