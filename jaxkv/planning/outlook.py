"""Computes seconds of a request, requests an hour, prices and the number of answers that pay for compression."""

import dataclasses
import math
from typing import Any

from jaxkv._values import amount
from jaxkv.planning.quality import Quality
from jaxkv.planning.served import Served
from jaxkv.planning.setting import Request
from jaxkv.planning.speed import Speed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """Estimated prefill and decode seconds of a batch of requests, and the requests and prices that follow from them.

    Attributes:
        batch: requests that run together.
        new: tokens that each request draws.
        prefill: seconds of the batch's prefill.
        decode: seconds of its decode steps.
        questions: requests that each prompt answers one after the other, so that they share its prefill.
        price: of all devices for an hour; None if it is not given.
    """

    batch: int
    new: int
    prefill: float
    decode: float
    questions: int = 1
    price: int | float | None = None

    @property
    def seconds(self) -> float:
        """Seconds that a request takes, as its whole batch: its share of prefill plus decode."""
        return self.prefill / self.questions + self.decode

    @property
    def requests(self) -> float:
        """Requests per hour if batches run one after the other, as a float."""
        return 3600 * self.batch / self.seconds

    @property
    def tokens(self) -> float:
        """New tokens per hour of all requests together, as a float."""
        return self.requests * self.new

    @property
    def price_of_requests(self) -> float | None:
        """Price of a thousand requests; None without a price."""
        return None if self.price is None else 1e3 * self.price / self.requests

    @property
    def price_of_tokens(self) -> float | None:
        """Price of a million new tokens; None without a price, or without new tokens."""
        return None if self.price is None or not self.new else 1e6 * self.price / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """Dict for JSON: batch, seconds, requests and tokens an hour, and prices if a price is given."""
        found = {
            "batch": self.batch,
            "questions": self.questions,
            "prefill_seconds": self.prefill,
            "decode_seconds": self.decode,
            "request_seconds": self.seconds,
            "requests_per_hour": self.requests,
            "tokens_per_hour": self.tokens,
        }
        if self.price is None:
            return found
        prices = {
            "per_thousand_requests": self.price_of_requests,
            "per_million_tokens": self.price_of_tokens,
        }
        return found | {"price": {"per_hour": self.price} | prices}

    def __str__(self) -> str:
        """One line of text: batch, seconds of a request, requests and new tokens an hour, prices."""
        batch = f"{self.batch:,} at a time" if self.batch > 1 else "one at a time"
        batch += f", {self.questions:,} of each prompt" if self.questions > 1 else ""
        text = f"requests, {batch}: {amount(self.seconds)} s each, {amount(self.requests)} an hour"
        text += f" with {amount(self.tokens)} new tokens"
        if self.price_of_requests is not None:
            text += f"; a thousand cost {amount(self.price_of_requests)}"
        if self.price_of_tokens is not None:
            text += f", a million new tokens {amount(self.price_of_tokens)}"
        return text


def service_of(speed: Speed, asked: Request, price: float | None) -> Service:
    """Makes the `Service` of a batch by its speed: prefill, then `new` decode steps, and an hour's price."""
    return Service(
        batch=asked.batch,
        new=asked.new,
        questions=asked.questions,
        prefill=speed.prefill,
        decode=asked.new * speed.step,
        price=price,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Payback:
    """Break-even of compression against the full cache: extra prefill seconds, and seconds saved per answer.

    Attributes:
        extra: seconds that prefill takes more than with the full cache; None if the full cache does not fit.
        saved: seconds that an answer takes less than with the full cache; None if the full cache does not fit.
    """

    extra: float | None
    saved: float | None

    @property
    def answers(self) -> int | None:
        """Number of answers from which on compression saves time: 1 if the full cache does not fit, None for never."""
        if self.extra is None or self.saved is None:
            return 1
        if self.saved <= 0:
            return None
        return max(1, math.floor(self.extra / self.saved) + 1)

    @property
    def word(self) -> str:
        """Text for a table: the number of answers, or `never`."""
        return "never" if self.answers is None else f"{self.answers:,}"

    def as_dict(self) -> dict[str, Any]:
        """Dict for JSON: number of answers, extra prefill seconds, seconds saved per answer."""
        return {
            "answers": self.answers,
            "extra_prefill_seconds": self.extra,
            "saved_answer_seconds": self.saved,
        }

    def __str__(self) -> str:
        """One sentence of text: from which answer on compression pays, and why."""
        if self.extra is None or self.saved is None:
            return "Compression pays at once: the full cache of this batch does not fit"
        more = f"prefill takes {amount(self.extra)} s more than with the full cache"
        less = f"an answer {amount(abs(self.saved))} s {'less' if self.saved > 0 else 'more'}"
        if self.answers is None:
            return f"Compression never pays in time: {more}, {less}"
        late = f"from answer {self.answers:,} of a document on"
        when = "at once, with the first answer" if self.answers == 1 else late
        return f"Compression pays {when}: {more}, {less}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """Estimated speed, requests an hour, break-even, quality and served slots of a plan; None for each that is unknown.

    Attributes:
        speed: of the batch asked for, if it fits.
        asked: requests an hour of this batch.
        most: requests an hour of the largest batch that fits, if it is another one.
        payback: when compression pays; None for a policy that keeps everything.
        quality: of a finished evaluation.
        silent: why there is no speed, as text; empty if there is one.
        served: slots of an engine and their requests a second, or text on why no engine takes the policy; None if it
            is not asked for.
    """

    speed: Speed | None = None
    asked: Service | None = None
    most: Service | None = None
    payback: Payback | None = None
    quality: Quality | None = None
    silent: str = ""
    served: Served | str | None = None

    @property
    def best(self) -> Service | None:
        """`Service` of the largest batch that fits, else of the batch asked for; None if neither has a speed."""
        return self.asked if self.most is None else self.most

    def lines(self, estimated: str) -> list[str]:
        """List of report lines: speed, requests, slots, break-even, quality; `estimated` begins the line on speed."""
        lines = [f"No estimate of speed: {self.silent}."] if self.silent else []
        if self.speed is not None:
            step = f"{self.speed.tokens:,.0f} tokens/s ({self.speed.step * 1e3:.1f} ms a step)"
            lines.append(f"{estimated}: {step}, prefill {self.speed.prefill:,.1f} s.")
        lines += [f"  {each}" for each in (self.asked, self.most) if each is not None]
        if self.served is not None:
            lines.append(
                f"  {self.served}"
                if isinstance(self.served, Served)
                else f"Not served: {self.served}"
            )
        if self.speed is not None:
            lines.append(f"  assumed: {self.speed.assumed}")
        if self.payback is not None:
            lines.append(f"{self.payback}.")
        if self.quality is not None:
            lines.append(f"{self.quality}.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Dict for JSON: speed, requests of the batch and of the largest batch, break-even, quality, any slots."""
        parts = {
            "requests": self.asked,
            "requests_of_largest_batch": self.best,
            "pays": self.payback,
        }
        found = {name: None if each is None else each.as_dict() for name, each in parts.items()}
        speed = None if self.speed is None else dataclasses.asdict(self.speed)
        quality = None if self.quality is None else dataclasses.asdict(self.quality)
        found = {"estimated": speed, **found, "quality": quality}
        if self.served is None:
            return found
        return found | {
            "served": self.served.as_dict() if isinstance(self.served, Served) else None
        }
