"""OmniKV: every row is kept; filter layers choose the tokens that the layers above them read."""

import dataclasses
import functools
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from jaxkv._errors import require
from jaxkv._values import ENDLESS, choice, count, flag, is_whole, plain, real, typed
from jaxkv.policies.base import Policy
from jaxkv.policies.protocol import Needs, Settings
from jaxkv.policies.reading import WHOLE, Reading, Selector, sources, whole_layers
from jaxkv.policies.wrapped import takes_the_rest_from_base

_TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniKV(Policy):
    """Drops nothing: a few filter layers choose, for every new token, what the layers above them read.

    Attributes:
        filter_layers: layers that choose; None takes those found for the model, which its manifest names.
        budget: int: tokens of the prompt that the other layers read. float in (0, 1]: that share of each sequence's
            own prompt. By default 1024. Tokens after the prompt are read besides. At least the window, if it counts: a
            smaller number is refused, a smaller share of a short prompt becomes the window.
        mem: the paper's Mem% in place of a budget: the share of the cache that layers which read everything hold, and
            the others' tokens, at least the window as above.
        selector: `Selector`, or its value: which queries choose.
        window: newest tokens whose queries choose, if not only the last one's does.
        adjacent: layers behind a filter that read everything, while chosen rows are on their way.
        include_generated: tokens after the prompt are read only if they are chosen, too.
        offload: rows of the layers that read chosen tokens wait in host memory.
        prefill_ratio: None runs prompts through full attention. Otherwise prompts go chunk by chunk, and those layers
            read this many chosen earlier tokens for each token of the chunk, and the chunk.
        prefill_chunk: tokens of such a chunk.
        base: a policy (or its name or class) that compresses the prompt first; its heads read those of their kept rows
            that are chosen.

    References:
        Hao et al., OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs, ICLR 2025, sections 4 and 5,
        equations 3 and 4, appendix D.10. Unlike its code, window queries stand at their own positions, and "last"
        is the paper's: a softmax over the prompt for each head before the largest is taken.
    """

    filter_layers: tuple[int, ...] | None = None
    mem: float | None = None
    selector: Selector | str = Selector.LAST
    window: int = 16
    adjacent: int = 1
    include_generated: bool = False
    offload: bool = False
    prefill_ratio: int | float | None = None
    prefill_chunk: int = 1024
    base: Policy | type[Policy] | str | None = None

    paper: ClassVar[str] = "OmniKV, ICLR 2025"

    def __post_init__(self) -> None:
        choice(self, "selector", Selector)
        if self.filter_layers is not None:
            several = isinstance(self.filter_layers, (tuple, list, np.ndarray))
            layers = tuple(plain(layer) for layer in self.filter_layers) if several else ()
            ascending = bool(layers) and all(map(is_whole, layers)) and sorted(set(layers)) == list(layers)
            require(
                ascending, "filter_layers", self.filter_layers, "give one or more layers, ascending, such as (2, 8, 18)"
            )
            object.__setattr__(self, "filter_layers", layers)
        for name, least in (("window", 1), ("adjacent", 0), ("prefill_chunk", 16)):
            count(self, name, least, f"give a number, at least {least}")
        for name in ("include_generated", "offload"):
            flag(self, name)
        chunk = self.prefill_chunk
        blocks = chunk <= 256 or chunk % 256 == 0
        require(blocks, "prefill_chunk", chunk, "give at most 256, or a multiple of it")
        if self.prefill_ratio is not None:
            remedy = "give chosen tokens per token of a chunk, such as 2, or None for full attention"
            real(self, "prefill_ratio", remedy, low=0, high=1e9, above=True)
        generated, offload = self.include_generated, self.offload
        remedy = "rows after the prompt stay on the device and are always read there: leave one out"
        require(not (generated and offload), "include_generated", generated, remedy)
        super().__post_init__()

    def _check_budget(self) -> None:
        mem, budget = self.mem, self.budget
        require(mem is None or budget is None, "mem", mem, f"it solves for the budget, which is {budget!r}: give one")
        if mem is not None:
            real(self, "mem", "give the share of the cache that stays at hand, in (0, 1]", low=0, high=1, above=True)
            return
        budget = self._plain_budget("give tokens (an int) or a share of the prompt (a float)")
        if isinstance(budget, float):
            require(0 < budget <= 1, "budget", budget, "a ratio lies in (0, 1]; for a number of tokens give an int")
        elif budget is not None:
            require(budget >= 1, "budget", budget, "read at least 1 token, or give a ratio in (0, 1]")
            least = 1 if self.selector is Selector.LAST else self.window
            require(budget >= least, "budget", budget, f"below the window, whose {least} tokens are always read")

    def _check_given(self) -> None:
        super()._check_given()
        base = self.inner
        for name in ("protect", "every", "merge", "min_budget"):
            default = next(field.default for field in dataclasses.fields(Policy) if field.name == name)
            value = getattr(self, name)
            its = default if base is None else getattr(base.settings, name)
            same = typed(value) in (typed(default), typed(its))
            require(same, name, value, "OmniKV drops nothing: give it to the base, if any")
        if base is None:
            return
        require(not isinstance(base, OmniKV), "base", base, "give the policy that it is built on")
        require(base.scorer is not None, "base", base, "it compresses nothing: leave it out")
        require(base.upkeep is None, "base", base, "it goes on compressing: give one that then appends")
        require(not base.rolling, "base", base, "positions within the cache change: leave rolling positions out")
        generated = self.include_generated
        require(not generated, "include_generated", generated, "the base's choice is the prompt's: leave one out")
        require(not self.offload, "offload", True, "only whole prompts wait in host memory: leave the base out")
        chunked = self.prefill_ratio is not None
        require(not chunked, "prefill_ratio", self.prefill_ratio, "the base scores whole prompts: leave one out")

    def meaning(self) -> dict[str, Any]:
        """What is read and what is kept, however it was given."""
        mine = {"budget": self._wanted, "base": self.inner, "protect": (), "every": None, "merge": None}
        return super().meaning() | mine | {"min_budget": None}

    # What is stored is the base's business; without one, everything is.

    @functools.cached_property
    def inner(self) -> Policy | None:
        """The base, if any."""
        from jaxkv.policies.registry import as_policy

        return None if self.base is None else as_policy(self.base, field="base")

    @property
    def settings(self) -> Settings:
        """The base's; without one nothing is asked for: its own budget is what is read."""
        given = super().settings if self.inner is None else self.inner.settings
        return dataclasses.replace(given, budget=None) if self.inner is None else given

    @property
    def by_chunks(self) -> bool:
        """With a `prefill_ratio`."""
        return self.prefill_ratio is not None

    @property
    def needs(self) -> Needs:
        """The base's needs, and the window's queries where they choose."""
        needs = super().needs if self.inner is None else self.inner.needs
        window = 0 if self.selector is Selector.LAST else self.window
        return dataclasses.replace(needs, queries=max(needs.queries, window))

    @property
    def upkeep(self) -> None:
        """Nothing goes on after the prompt, in any base that it takes."""
        return None

    # What is read.

    @property
    def _wanted(self) -> int | float | None:
        """The budget as given, or the usual one; None where `mem` solves for it."""
        budget = _TOKENS if self.budget is None and self.mem is None else self.budget
        return min(budget, ENDLESS) if isinstance(budget, int) else budget

    def parts(self) -> dict[str, str]:
        """The parts by name, and what is read of what they keep."""
        tokens = f"mem={self.mem}" if self._wanted is None else f"budget={self._wanted!r}"
        assert isinstance(self.selector, Selector)
        chosen = f"{tokens}, chosen by the {self.selector.value} selector in filter layers"
        where = "; the rest waits in host memory" if self.offload else ""
        return super().parts() | {"read": chosen + where}

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "OmniKV":
        """This policy with its filter layers named."""
        if self.filter_layers is None:
            remedy = (
                "none have been found for this model: `jaxkv filters` finds them; give filter_layers=(2, 8, 18), say"
            )
            require(found is not None, "filter_layers", None, remedy)
            return dataclasses.replace(self, filter_layers=found).for_model(layers, found)
        its = None if self.inner is None else self.inner.for_model(layers, found)
        if its is not self.inner:
            return dataclasses.replace(self, base=its).for_model(layers, found)
        top = self.filter_layers[-1]
        require(top < layers, "filter_layers", self.filter_layers, f"the model's layers are 0 to {layers - 1}")
        sparse = layers - len(self._whole(layers))
        require(sparse > 0, "filter_layers", self.filter_layers, "no layer is left to read what they choose")
        self._share(layers)
        return self

    def _whole(self, layers: int) -> tuple[int, ...]:
        filters = self.filter_layers
        if filters is None:
            remedy = "give them, such as (2, 8, 18); `generate` and `prefill` take those found for the model"
            require(False, "filter_layers", None, remedy)
        assert filters is not None
        return whole_layers(filters, self.adjacent, layers)

    def _share(self, layers: int) -> Fraction:
        """The share of a prompt's tokens that is read, where it is one."""
        if self.mem is None:
            return Fraction(repr(float(self._wanted or 0)))
        whole, mem = Fraction(len(self._whole(layers)), layers), Fraction(repr(self.mem))
        remedy = f"layers that read everything hold {float(whole):.4g} of the cache: give more, or lower filter layers"
        require(mem > whole, "mem", self.mem, remedy)
        return (mem - whole) / (1 - whole)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Tokens that a layer reads which reads what was chosen, those after the prompt left out.

        Args:
            lengths: tokens of each prompt.
            layers: L.

        Returns:
            The budget, or the share's whole number of each prompt; at least the window, or 1, at most the prompt.

        References:
            OmniKV, section 5: Mem% = whole + share * (1 - whole).
        """
        lengths = np.asarray(lengths, np.int64)
        asked = self._wanted
        if isinstance(asked, int):
            wanted = np.full_like(lengths, asked)
        else:
            share = self._share(layers)
            wanted = np.asarray([n * share.numerator // share.denominator for n in lengths.tolist()], np.int64)
        least = 1 if self.selector is Selector.LAST else self.window
        # Where later tokens have to be chosen, too, a budget in tokens is no smaller for a short prompt.
        grows = self.include_generated and isinstance(asked, int)
        return np.maximum(wanted, least) if grows else np.minimum(np.maximum(wanted, least), lengths)

    def reading(self, layers: int, slots: int) -> Reading:
        """Which layers read what, for prompts of a bucket."""
        whole = self._whole(layers)
        assert self.filter_layers is not None and isinstance(self.selector, Selector)
        return Reading(
            filters=self.filter_layers,
            sources=sources(self.filter_layers, self.adjacent, layers),
            selector=self.selector,
            window=1 if self.selector is Selector.LAST else self.window,
            include_generated=self.include_generated,
            every_row=self.inner is None,
            offloaded=tuple(sorted(set(range(layers)) - set(whole))) if self.offload else (),
            ahead=1,
            slots=slots,
            width=int(self.tokens(np.asarray([slots]), layers)[0]),
        )


takes_the_rest_from_base(OmniKV)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrutalOffload(Policy):
    """Full attention with the upper layers' rows in host memory, each loaded whole for every token: a baseline.

    Attributes:
        resident_layers: layers from the bottom whose rows stay on the device.
        ahead: layers that a load is ahead of its use.

    References:
        OmniKV, section 5.2 ("Brutal Offload": the final 20 of 32 layers, 4 layers ahead); its code keeps 10 layers.
    """

    resident_layers: int = 10
    ahead: int = 4

    paper: ClassVar[str] = "OmniKV, ICLR 2025, section 5.2"

    def __post_init__(self) -> None:
        require(self.budget is None, "budget", self.budget, "it reads everything: leave it out")
        for name, least in (("resident_layers", 1), ("ahead", 0)):
            count(self, name, least, f"give a number, at least {least}")
        super().__post_init__()

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "BrutalOffload":
        """This policy, if the model has layers to offload."""
        fits = self.resident_layers < layers
        require(fits, "resident_layers", self.resident_layers, f"the model has {layers} layers: give fewer")
        return self

    def reading(self, layers: int, slots: int) -> Reading:
        """Every layer reads everything."""
        return Reading(
            filters=(),
            sources=(WHOLE,) * layers,
            selector=Selector.LAST,
            window=1,
            include_generated=False,
            every_row=True,
            offloaded=tuple(range(self.resident_layers, layers)),
            ahead=self.ahead,
            slots=slots,
            width=slots,
        )
