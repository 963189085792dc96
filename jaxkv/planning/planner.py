"""Plans: whether a model, a policy and prompts fit on GPUs, how much more would, and what would make them fit."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack, overload

from jaxkv._errors import require
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.planning import table
from jaxkv.planning.catalog import Known, model_named
from jaxkv.planning.compiled import CompiledPlan, compile_plan
from jaxkv.planning.gpus import gpus_named
from jaxkv.planning.machine import MachinePlan, machine_planned
from jaxkv.planning.search import largest, lengths_below
from jaxkv.planning.setting import Asked, Setting
from jaxkv.planning.sizes import Sizes, sizes_of
from jaxkv.planning.speed import Speed, estimate
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import POLICIES, as_policy

# Budgets are offered in such steps, and policies in this order where the one that was asked for does not fit.
_STEP, _LEAST_BUDGET, _USUAL_BUDGET = 64, 128, 2048
_OTHERS = ("snapkv", "adakv", "h2o")
# Of the memory that a driver reports JAX takes this share, unless told otherwise.
_PREALLOCATED = 0.75
_FEW, _MOST_BATCH = 8, 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """Something that would make a setting fit, by the same arithmetic.

    Attributes:
        about: in words.
        setting: as it would then be.
        peak: the most that a GPU would hold, in bytes.
    """

    about: str
    setting: Setting
    peak: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model, a policy and prompts take on GPUs that need not be there. Bytes are those of one GPU.

    Attributes:
        setting: what was asked.
        sizes: by arithmetic.
        largest_batch: prompts of this length that fit; 0 where none does.
        largest_context: tokens that so many prompts can have each; 0 where not even one fits.
        remedies: what would make it fit, where it does not.
        speed: an estimate that no GPU has confirmed; None where it would rest on another machine's part.
        notes: what was assumed.
        compiled: what the real compiler says, if it was asked.
    """

    setting: Setting
    sizes: Sizes
    largest_batch: int
    largest_context: int
    remedies: tuple[Remedy, ...] = ()
    speed: Speed | None = None
    notes: tuple[str, ...] = ()
    compiled: CompiledPlan | None = None

    @property
    def weights(self) -> int:
        """A GPU's part of the parameters."""
        return self.sizes.weights

    @property
    def cache(self) -> int:
        """A GPU's part of the compressed cache, room for new tokens and what the policy remembers included."""
        return self.sizes.grown

    @property
    def prefill_peak(self) -> int:
        """The most that lies on a GPU while prompts are prefilled."""
        return self.sizes.prefill_peak

    @property
    def decode_peak(self) -> int:
        """The most that lies on a GPU while tokens are drawn."""
        return self.sizes.decode_peak

    @property
    def host(self) -> int:
        """What waits in host memory on a GPU's behalf."""
        return self.sizes.host

    @property
    def fits(self) -> bool:
        """Whether the larger peak is within the GPU's memory."""
        return self.sizes.peak <= self.setting.gpu.memory

    def __str__(self) -> str:
        """What `jaxkv plan` prints."""
        return table.described(self)

    def __repr__(self) -> str:
        """One line."""
        return f"Plan({table.title(self.setting)}: {table.verdict(self)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook, the text."""
        printer.text(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can have it."""
        return table.record(self)


Model = str | os.PathLike[str] | ModelConfig | LanguageModel


class _Options(TypedDict, total=False):
    """What `plan` takes besides a model, GPUs and tokens."""

    mesh: str | tuple[int, int] | None
    batch: int
    new: int
    policy: Method | type[Method] | str | None
    dtype: Any
    compile: bool


@overload
def plan(  # type: ignore[overload-overlap]
    model: Model, *, gpus: Literal["cpu"], context: int, **options: Unpack[_Options]
) -> MachinePlan: ...
@overload
def plan(model: Model, *, gpus: str = "h100x8", context: int, **options: Unpack[_Options]) -> Plan: ...
def plan(
    model: Model,
    *,
    gpus: str = "h100x8",
    mesh: str | tuple[int, int] | None = None,
    context: int,
    batch: int = 1,
    new: int = 256,
    policy: Method | type[Method] | str | None = None,
    dtype: Any = None,
    compile: bool = False,
) -> Plan | MachinePlan:
    """Plans memory on GPUs that need not be there, by arithmetic and at once.

    Args:
        model: a name of the catalogue such as `llama-3.1-70b`, a folder, a `.gguf` file or a hub id, of which the
            config alone is read; or a config, or a model.
        gpus: their kind and how many, `h100x8` say; `cpu` for a process on this machine.
        mesh: groups of GPUs with a part of the prompts each, and GPUs of a group: `2x4` or `(2, 4)`; by default one
            group of all.
        context: tokens of each prompt.
        batch: prompts.
        new: tokens to draw after each.
        policy: the compression, or its name or class; FullKV() keeps everything.
        dtype: of weights, activations and cache; by default bfloat16 on GPUs and float32 on a CPU.
        compile: ask XLA's compiler, too; it must be installed, the GPUs need not be there.

    Returns:
        The plan; printed, it reads as `jaxkv plan`.

    Raises:
        ValueError: for a model or a GPU that is not known, with the nearest names; for a mesh that does not divide the
            model, a context that it was not made for, or a budget that cannot be honoured.
        TypeError: for an argument of the wrong kind.
        ImportError: if the compiler is asked and not installed; the message says how to get it.
    """
    sizes = {"context": context, "batch": batch, "new": new, "dtype": dtype}
    asked, notes = setting_of(known_model(model), gpus, mesh, policy=policy, **sizes)
    if isinstance(asked, Setting):
        return planned(asked, notes, compile=compile)
    require(not compile, "compile", True, "it is for GPUs: leave it out")
    return machine_planned(asked, notes)


def known_model(given: Any) -> Known:
    """A model's name and shape, of whatever was given for it."""
    if isinstance(given, Known):
        return given
    if isinstance(given, LanguageModel):
        return Known(name=given.name, config=given.config, filters=given.filter_layers)
    if isinstance(given, ModelConfig):
        return Known(name=f"a model of {given.layers} layers", config=given)
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"model={type(given).__name__}: give a name such as 'llama-3.1-70b', a path, or a ModelConfig")
    return model_named(given)


def setting_of(
    known: Known, gpus: str, mesh: str | tuple[int, int] | None, *, policy: Any, **sizes: Any
) -> tuple[Asked, tuple[str, ...]]:
    """What is asked, checked; and what it assumes.

    Args:
        known: the model.
        gpus: as for `plan`.
        mesh: as for `plan`.
        policy: as for `plan`.
        **sizes: context, batch, new and dtype.

    Returns:
        A `Setting`, or of a CPU what is to be done there; and what was assumed.
    """
    here = isinstance(gpus, str) and gpus.strip().lower() == "cpu"
    filters, given, notes = known.filters, as_policy(policy), list[str]()
    if filters is None and getattr(given, "filter_layers", ()) is None:
        filters = known.likely_filters
        heights = ", ".join(map(str, filters))
        told = f"filter layers {heights} are assumed, at the heights of Llama 3 8B's"
        notes.append(f"{told}: `jaxkv filters` finds a model's own")
    given = given.for_model(known.config.layers, filters)
    if sizes["dtype"] is None:
        sizes["dtype"] = "float32" if here else "bfloat16"
    options: dict[str, Any] = {"model": known.name, "config": known.config, "policy": given, **sizes}
    if here:
        require(mesh is None, "mesh", mesh, "a CPU is planned for as one device: leave it out")
        setting = Asked(**options)
    else:
        gpu, count = gpus_named(gpus)
        setting = Setting(gpu=gpu, gpus=count, data=_groups(mesh, count), **options)
    return setting, (*notes, *filter(None, (setting.beyond,)))


def _groups(mesh: Any, count: int) -> int:
    """How many groups a mesh makes of so many GPUs."""
    if mesh is None:
        return 1
    parts = mesh.lower().split("x") if isinstance(mesh, str) else list(mesh) if isinstance(mesh, (tuple, list)) else []
    remedy = f"give groups and GPUs of each, 1x{count} say: together they are {count}"
    counts = [text for each in parts if (text := str(each).strip()).isdecimal() and len(text) <= len(str(count))]
    sound = len(counts) == len(parts) == 2 and int(counts[0]) * int(counts[1]) == count
    require(sound, "mesh", mesh, remedy)
    return int(counts[0])


def planned(setting: Setting, notes: tuple[str, ...] = (), *, compile: bool = False) -> Plan:
    """The plan of a setting.

    Args:
        setting: the question.
        notes: what it assumes.
        compile: ask the compiler, too.

    Returns:
        The plan.
    """
    sizes = sizes_of(setting)
    fits = sizes.peak <= setting.gpu.memory
    if fits and sizes.peak > _PREALLOCATED * setting.gpu.reported:
        notes += ("JAX takes three quarters of a GPU unless told: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",)
    return Plan(
        setting=setting,
        sizes=sizes,
        largest_batch=largest_batch(setting),
        largest_context=largest_context(setting),
        remedies=() if fits else tuple(_remedies(setting)),
        speed=estimate(setting, sizes.weights),
        notes=notes,
        compiled=compile_plan(setting) if compile else None,
    )


def fits(setting: Setting) -> bool:
    """Whether a setting fits on its GPUs; no where its budget cannot be honoured."""
    try:
        return sizes_of(setting).peak <= setting.gpu.memory
    except ValueError:
        return False


def largest_batch(setting: Setting) -> int:
    """The most prompts of this length that fit; 0 where none does."""
    of = lambda batch: fits(dataclasses.replace(setting, batch=batch))  # noqa: E731
    # Few prompts go through the MLP in blocks of as many tokens as one of them: 5 can take less than 4.
    few = next((batch for batch in range(_FEW * setting.data, 0, -1) if of(batch)), 0)
    return largest(of, _MOST_BATCH, few) if few == _FEW * setting.data else few


def largest_context(setting: Setting) -> int:
    """The most tokens that so many prompts can have each, as far as the model was made for that; 0 where none fits."""
    of = lambda length: fits(dataclasses.replace(setting, context=length))  # noqa: E731
    return next(filter(of, lengths_below(setting.config.max_positions)), 0)


def _remedies(setting: Setting) -> Iterator[Remedy]:
    """What would make a setting fit: a smaller budget, another policy, more GPUs; each if there is one."""
    policy = setting.policy
    if isinstance(policy.parts().budget, int):
        yield from _smaller(setting, policy, _own_budget(policy))
    for name in _OTHERS:
        other = POLICIES[name]
        if type(policy) is not other:
            asked = policy.parts().budget
            # No less than what all of them can have, however short the prompts are, and whatever this one gets by with.
            budget = max(asked if isinstance(asked, int) else min(_USUAL_BUDGET, setting.context), _LEAST_BUDGET)
            found = list(_smaller(setting, other(budget=budget), budget, whole=True))
            if found:
                yield found[0]
                break
    yield from _more(setting)


def _own_budget(policy: Method) -> int:
    budget = policy.parts().budget
    assert isinstance(budget, int)
    return budget


def _smaller(setting: Setting, policy: Method, budget: int, *, whole: bool = False) -> Iterator[Remedy]:
    """The largest budget of a policy, up to this one, with which it fits."""

    def of(steps: int) -> Setting | None:
        given = budget if steps * _STEP >= budget else steps * _STEP
        try:
            return dataclasses.replace(setting, policy=_with_budget(policy, given))
        except ValueError:
            return None

    steps = -(-budget // _STEP)
    lowest = of(max(1, _LEAST_BUDGET // _STEP))
    if lowest is None or not fits(lowest):
        return
    found = of(largest(lambda each: (it := of(each)) is not None and fits(it), steps))
    if found is not None and fits(found):
        name = table.policy_name(found.policy)
        about = name if whole else f"a budget of {_own_budget(found.policy):,}: {name}"
        yield Remedy(about=about, setting=found, peak=sizes_of(found).peak)


def _with_budget(policy: Method, budget: int) -> Method:
    """A policy with another budget, which is its base's where it has one."""
    inner = getattr(policy, "inner", None)
    if isinstance(inner, Method) and inner.budget == policy.parts().budget and policy.budget is None:
        return dataclasses.replace(policy, base=_with_budget(inner, budget))  # type: ignore[call-arg]
    return dataclasses.replace(policy, budget=budget)


def _more(setting: Setting) -> Iterator[Remedy]:
    """The fewest GPUs of the kind that take it: the model split further, then in groups."""
    for times in (2, 4, 8, 16):
        for data in dict.fromkeys((setting.data, setting.data * times)):
            try:
                more = dataclasses.replace(setting, gpus=setting.gpus * times, data=data)
            except ValueError:
                continue
            if data <= setting.batch and fits(more):
                about = f"{more.gpu.name}x{more.gpus}" + (f" as {data}x{more.split}" if data > 1 else "")
                yield Remedy(about=about, setting=more, peak=sizes_of(more).peak)
                return
