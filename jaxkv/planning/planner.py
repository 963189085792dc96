"""`plan`: whether a model, a policy and prompts fit on GPUs or here, the largest that would, and what would help."""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, Unpack, overload

from jaxkv import memory
from jaxkv._checks import flag
from jaxkv._errors import require
from jaxkv._values import as_real
from jaxkv.cache import Dense, Int8
from jaxkv.cache.stores import held_dtype
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import as_weights
from jaxkv.planning.catalog import Known, model_named, scaled
from jaxkv.planning.compiled import compile_plan
from jaxkv.planning.host_speed import host_estimate
from jaxkv.planning.named import accelerators_named
from jaxkv.planning.outlook import Outlook, Payback, service_of
from jaxkv.planning.plans import MachinePlan, Plan, Remedy, policy_name
from jaxkv.planning.process import host_weights, process_of
from jaxkv.planning.quality import Quality, qualities
from jaxkv.planning.search import largest, lengths_below
from jaxkv.planning.served import Served, Slot
from jaxkv.planning.setting import Asked, HostSetting, Request, Setting, as_dtype, tokens_of
from jaxkv.planning.sizes import sizes_of, weights_of
from jaxkv.planning.speed import Speed, estimate
from jaxkv.policies.checks import Tokens
from jaxkv.policies.fitting import policy_for
from jaxkv.policies.methods.full import FullKV
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import POLICIES, as_policy
from jaxkv.policies.wrapper import with_budget

# Remedies offer budgets in multiples of _STEP, from _LEAST_BUDGET on, and other policies in the order of _OTHERS.
_STEP, _LEAST_BUDGET, _USUAL_BUDGET = 64, 128, 2048
_OTHERS = ("snapkv", "adakv", "h2o")
# Share of the memory that a driver reports which JAX takes by default.
_PREALLOCATED = 0.75
_FEW, _MOST_BATCH, _MOST_BATCH_HERE = 8, 1 << 16, 1 << 12

Model = str | os.PathLike[str] | ModelConfig | LanguageModel


class _Options(TypedDict, total=False):
    """Keyword arguments of `plan` besides model, GPUs and context, as a TypedDict for its overloads."""

    mesh: str | tuple[int, int] | None
    batch: int
    new: int
    questions: int
    policy: Method | type[Method] | str | None
    dtype: Any
    weights: Any
    rope_scaling: str | None
    price: int | float | None
    quality: str | os.PathLike[str] | None
    serve: bool
    compile: bool


@overload
def plan(  # type: ignore[overload-overlap]
    model: Model, *, gpus: Literal["cpu"], context: int | str, **options: Unpack[_Options]
) -> MachinePlan: ...
@overload
def plan(
    model: Model, *, gpus: str = "h100x8", context: int | str, **options: Unpack[_Options]
) -> Plan: ...
def plan(
    model: Model,
    *,
    gpus: str = "h100x8",
    mesh: str | tuple[int, int] | None = None,
    context: int | str,
    batch: int = 1,
    new: int = 256,
    questions: int = 1,
    policy: Method | type[Method] | str | None = None,
    dtype: Any = None,
    weights: Any = None,
    rope_scaling: str | None = None,
    price: int | float | None = None,
    quality: str | os.PathLike[str] | None = None,
    serve: bool = False,
    compile: bool = False,
) -> Plan | MachinePlan:
    """Plans memory, speed of prompts on GPUs, TPUs, present or not, or on this CPU; returns `Plan` or `MachinePlan`.

    Args:
        model: a name of the catalogue such as `llama-3.1-70b`, a folder, a `.gguf` file or a hub id, of which the
            config alone is read; or a config, or a model.
        gpus: GPUs or TPUs, their kind and how many, `h100x8`, `8xh100` or `v6e:8`; `cpu` for a process on this machine,
            whose speed is measured for about two seconds.
        mesh: data-parallel groups of GPUs, and GPUs of a group: `2x4` or `(2, 4)`; by default one group of all.
        context: tokens of each prompt: a number, or a text such as `128K`, where K is 1024.
        batch: number of prompts.
        new: tokens to draw after each prompt.
        questions: requests that each prompt answers; they share its prefill in seconds, requests an hour and prices.
        policy: the compression, or its name or class; FullKV() keeps everything.
        dtype: of weights, activations and cache; by default bfloat16 on GPUs and float32 on a CPU.
        weights: "int8" or "int4" for linear maps in 8 or 4 bits, as `jaxkv.load` takes it.
        rope_scaling: "yarn:4" for four times the model's positions by YaRN, as a config.json's `rope_scaling` has it.
        price: of one GPU, or of this machine, for an hour, in any currency; None leaves prices out.
        quality: folder of an evaluation (`jaxkv eval`, `jaxkv.evaluate`) that has a score of this policy.
        serve: plan an `Engine`, too: the slots that fit, and the requests of this length that they answer a second.
        compile: ask XLA's compiler, too; it must be installed, the GPUs need not be there.

    Returns:
        The plan; printed, it reads as `jaxkv plan`.

    Raises:
        ValueError: for a model or a GPU that is not known, with the nearest names; for a mesh that does not divide the
            model, a context that it was not made for, or a budget that cannot be honoured.
        TypeError: for an argument of the wrong kind.
        ImportError: if the compiler is asked and not installed; the message says how to get it.
    """
    known = scaled(known_model(model), rope_scaling)
    asked = Asked(
        policy=policy,
        context=context,
        batch=batch,
        new=new,
        questions=questions,
        dtype=dtype,
        weights=weights,
    )
    setting, notes = setting_of(known, gpus, mesh, asked)
    require(
        isinstance(setting, Setting) or not compile,
        "compile",
        True,
        "it is for GPUs and TPUs: leave it out",
    )
    require_price(price)
    scores, more = qualities(quality, [setting], [as_policy(policy)])
    return planned(
        setting,
        notes + more,
        price=price,
        quality=scores[0],
        serve=flag("serve", serve),
        compile=compile,
    )


def require_price(price: Any) -> None:
    """Raises ValueError for an hourly price that is not a positive finite number; None is allowed."""
    value = as_real(price)
    sound = price is None or (value is not None and math.isfinite(value) and value > 0)
    require(sound, "price", price, "give the price of a GPU for an hour, 2.5 say")


def known_model(given: Any) -> Known:
    """`Known` (name, config, filter layers) of a model name, path, config or loaded model; TypeError for others."""
    if isinstance(given, Known):
        return given
    if isinstance(given, LanguageModel):
        return Known(name=given.name, config=given.config, filters=given.filter_layers)
    if isinstance(given, ModelConfig):
        return Known(name=f"a model of {given.layers} layers", config=given)
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"model={type(given).__name__}: give a name such as 'llama-3.1-70b', a path, or a ModelConfig"
        )
    return model_named(given)


def setting_of(
    known: Known,
    gpus: str,
    mesh: str | tuple[int, int] | None,
    asked: Asked,
) -> tuple[Setting | HostSetting, tuple[str, ...]]:
    """Checks `plan`'s arguments; returns a `Setting` (GPUs) or `HostSetting` (CPU), and texts on assumptions."""
    here = isinstance(gpus, str) and gpus.strip().lower() == "cpu"
    filters, given, notes = known.filters, as_policy(asked.policy), list[str]()
    if filters is None and getattr(given, "filter_layers", ()) is None:
        filters = known.likely_filters
        assumed = f"filter layers {', '.join(map(str, filters))} are assumed, at the heights of Llama 3 8B's"
        windows = any(known.config.windows)
        remedy = (
            "`jaxkv filters` finds none beside windows"
            if windows
            else "`jaxkv filters` finds a model's own"
        )
        notes.append(f"{assumed}: {remedy}")
    dtype = as_dtype(("float32" if here else "bfloat16") if asked.dtype is None else asked.dtype)
    held = held_dtype(dtype, "cpu") if here else dtype
    given = policy_for(given, known.config, filters, dtype=held)
    if as_weights(asked.weights) == "int8" and not here:
        notes.append(
            "weights in 8 bits are taken to be read at the rate that one sequence's products reached"
        )
    numbers = {name: getattr(asked, name) for name in ("batch", "new", "questions")}
    numbers["context"] = tokens_of(asked.context)
    request = Request(
        model=known.name,
        config=known.config,
        policy=given,
        dtype=dtype,
        weights=asked.weights,
        **numbers,
    )
    fields = vars(request)
    setting: Setting | HostSetting
    if here:
        require(mesh is None, "mesh", mesh, "a CPU is planned for as one device: leave it out")
        setting = HostSetting(memory=memory.machine_bytes(), **fields)
    else:
        gpu, count = accelerators_named(gpus)
        setting = Setting(gpu=gpu, gpus=count, data=_groups(mesh, count), **fields)
    return setting, (*notes, *filter(None, (setting.beyond,)))


def _groups(mesh: Any, count: int) -> int:
    """Number of data-parallel groups of a mesh such as `2x4`, 1 for None; ValueError unless it has `count` GPUs."""
    if mesh is None:
        return 1
    parts = (
        mesh.lower().split("x")
        if isinstance(mesh, str)
        else list(mesh)
        if isinstance(mesh, (tuple, list))
        else []
    )
    remedy = f"give groups and GPUs of each, 1x{count} say: together they are {count}"
    counts = [
        text
        for each in parts
        if (text := str(each).strip()).isdecimal() and len(text) <= len(str(count))
    ]
    sound = len(counts) == len(parts) == 2 and int(counts[0]) * int(counts[1]) == count
    require(sound, "mesh", mesh, remedy)
    return int(counts[0])


def planned(
    setting: Setting | HostSetting,
    notes: tuple[str, ...] = (),
    *,
    price: int | float | None = None,
    quality: Quality | None = None,
    serve: bool = False,
    compile: bool = False,
) -> Plan | MachinePlan:
    """`Plan` (GPUs; also remedies) or `MachinePlan` (CPU) of a setting: bytes, largest batch and context, speed.

    `price` is of one device for an hour; `serve` plans the slots of an engine; `compile` adds XLA's figures for GPUs.
    """
    most = largest_batch(setting)
    outlook = outlook_of(setting, most, price=price, quality=quality)
    if serve:
        outlook = dataclasses.replace(outlook, served=served_of(setting, price))
    if isinstance(setting, HostSetting):
        return MachinePlan(
            setting=setting,
            process=process_of(setting),
            largest_batch=most,
            largest_context=largest_context(setting),
            outlook=outlook,
            notes=notes,
        )
    sizes = sizes_of(setting)
    enough = sizes.peak <= setting.memory
    if (
        enough
        and setting.gpu.platform == "cuda"
        and sizes.peak > _PREALLOCATED * setting.gpu.reported
    ):
        notes += (
            "JAX takes three quarters of a GPU unless told: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
        )
    return Plan(
        setting=setting,
        sizes=sizes,
        largest_batch=most,
        largest_context=largest_context(setting),
        remedies=() if enough else tuple(_remedies(setting)),
        outlook=outlook,
        notes=notes,
        compiled=compile_plan(setting) if compile else None,
    )


_FROM_HOST = "rows come from host memory, which is another machine's part"


def outlook_of(
    setting: Setting | HostSetting,
    most: int,
    *,
    price: int | float | None = None,
    quality: Quality | None = None,
) -> Outlook:
    """`Outlook` (speed, requests an hour, break-even, quality) of a setting's batch and of its largest batch `most`.

    There is no speed if the batch does not fit, or if rows are offloaded, or decoded in each step.
    """
    count = setting.gpus if isinstance(setting, Setting) else 1
    hourly, fitting = None if price is None else price * count, fits(setting)
    here = isinstance(setting, HostSetting)
    # Where a machine's free memory is unknown, every batch counts as fitting: there is no largest one.
    known = not here or setting.memory is not None
    batches = [
        setting.batch if fitting else 0,
        most if most and known and most != setting.batch else 0,
    ]
    speeds = [
        speed_of(dataclasses.replace(setting, batch=batch)) if batch else None for batch in batches
    ]
    asked, largest = (
        None
        if speed is None
        else service_of(speed, dataclasses.replace(setting, batch=batch), hourly)
        for speed, batch in zip(speeds, batches, strict=True)
    )
    silent = ""
    if speeds[0] is None:
        silent = (_unmeasured(setting) or _FROM_HOST) if fitting else "it does not fit"
    payback = None
    if speeds[0] is not None and setting.policy.parts() != FullKV().parts():
        whole = dataclasses.replace(setting, policy=FullKV())
        full = speed_of(whole) if fits(whole) else None
        payback = Payback(extra=None, saved=None)
        if full is not None:
            saved = setting.new * (full.step - speeds[0].step)
            payback = Payback(extra=speeds[0].prefill - full.prefill, saved=saved)
    return Outlook(
        speed=speeds[0], asked=asked, most=largest, payback=payback, quality=quality, silent=silent
    )


def served_of(setting: Setting | HostSetting, price: int | float | None = None) -> Served | str:
    """`Served` (engine slots that fit, their speed) for a setting's prompts; error text if slots refuse the policy.

    `price` is of one device for an hour.
    """
    groups = setting.data if isinstance(setting, Setting) else 1
    one = dataclasses.replace(setting, batch=groups)
    try:
        slot = Slot.of(one)
    except ValueError as error:
        return str(error)

    def fit(count: int) -> bool:
        if isinstance(one, HostSetting):
            return one.memory is None or process_of(one).first_peak + slot.held(count) <= one.memory
        sizes, every = sizes_of(one), sizes_of(dataclasses.replace(one, batch=count * groups))
        return sizes.weights + sizes.prefill + every.decode + slot.held(count) <= one.memory

    known = isinstance(one, Setting) or one.memory is not None
    slots = groups * (largest(fit, _MOST_BATCH) if known and fit(1) else 0)
    both = [
        speed_of(dataclasses.replace(one, batch=batch)) if slots else None
        for batch in (groups, slots)
    ]
    hourly = (
        None if price is None else price * (setting.gpus if isinstance(setting, Setting) else 1)
    )
    return slot.served(slots, *both, price=hourly)


def speed_of(setting: Setting | HostSetting) -> Speed | None:
    """Estimated `Speed` by data sheets (GPUs) or measured rates (CPU); None where no rate was measured.

    That is so if rows come from host memory, each step converts rows or weights first, or layers have windows.
    """
    if _unmeasured(setting):
        return None
    if isinstance(setting, HostSetting):
        return host_estimate(setting, host_weights(setting))
    held, wide = (
        weights_of(setting.config, setting.dtype, setting.mesh, of)
        for of in (setting.weights, None)
    )
    return estimate(setting, wide, held)


def _unmeasured(setting: Setting | HostSetting) -> str:
    """Text on why there is no speed: steps convert rows or weights first, or layers have windows; else empty."""
    if any(setting.config.windows):
        return "prefill's attention within windows has not been measured"
    parts, here = setting.policy.parts(), isinstance(setting, HostSetting)
    several = setting.sequences > 1 or setting.config.experts is not None
    if (here and setting.weights is not None) or (setting.weights == "int4" and several):
        bits = setting.weights.removeprefix("int")
        return f"each step converts weights in {bits} bits, at a rate that is not measured"
    if parts.store is Dense:
        return ""
    if not here and parts.read_as_stored(setting.config.head_dim):
        # Keys and values in 4 bits have a kernel, as yet only compiled.
        return "" if parts.store is Int8 else "attention over rows in 4 bits has not been measured"
    return "each step decodes these rows, no kernel reads them as they are stored"


def fits(setting: Setting | HostSetting) -> bool:
    """True if a setting's peak bytes fit its memory, or that is unknown; False if its budget cannot be kept."""
    try:
        if isinstance(setting, Setting):
            return sizes_of(setting).peak <= setting.memory
        return setting.memory is None or process_of(setting).first_peak <= setting.memory
    except ValueError:
        return False


def largest_batch(setting: Setting | HostSetting) -> int:
    """Largest number of prompts of the setting's length that fits, at most 65,536 (4,096 on a CPU); 0 if none does."""

    def fit(batch: int) -> bool:
        return fits(dataclasses.replace(setting, batch=batch))

    if isinstance(setting, HostSetting):
        return largest(fit, _MOST_BATCH_HERE)
    # Not monotone for few prompts, which go through the MLP in blocks of one prompt's tokens: 5 can take less than 4.
    few = next((batch for batch in range(_FEW * setting.data, 0, -1) if fit(batch)), 0)
    return largest(fit, _MOST_BATCH, few) if few == _FEW * setting.data else few


def largest_context(setting: Setting | HostSetting) -> int:
    """Largest prompt length, the model's limit or a bucket's size, that fits with the setting's batch; 0 if none."""
    lengths = lengths_below(setting.config.max_positions)
    return next(
        (length for length in lengths if fits(dataclasses.replace(setting, context=length))), 0
    )


def _remedies(setting: Setting) -> Iterator[Remedy]:
    """Yields `Remedy` values, changed settings that fit: a smaller budget, a policy, narrower weights, more GPUs.

    Policies are offered only for one that keeps all rows: another method is another quality.
    """
    policy, kept = setting.policy, setting.policy.composed.budget
    budget = kept.value if isinstance(kept, Tokens) else None
    if budget is not None:
        smaller = _with_smaller_budget(setting, policy, budget)
        if smaller is not None:
            rows, name = smaller.policy.composed.budget, policy_name(smaller.policy)
            yield Remedy(
                about=f"a budget of {rows}: {name}", setting=smaller, peak=sizes_of(smaller).peak
            )
    # At least _LEAST_BUDGET, which every policy accepts, even for short prompts or a small budget.
    budget = max(min(_USUAL_BUDGET, setting.context) if budget is None else budget, _LEAST_BUDGET)
    for name in _OTHERS if policy.parts().scorer is None else ():
        smaller = _with_smaller_budget(setting, POLICIES[name](budget=budget), budget)
        if smaller is not None:
            yield Remedy(
                about=policy_name(smaller.policy), setting=smaller, peak=sizes_of(smaller).peak
            )
            break
    for bits in (8, 4) if setting.weights is None else ():
        narrow = dataclasses.replace(setting, weights=f"int{bits}")
        if fits(narrow):
            yield Remedy(
                about=f"weights in {bits} bits", setting=narrow, peak=sizes_of(narrow).peak
            )
            break
    larger = _with_more_gpus(setting)
    if larger is not None:
        about = f"{larger.gpu.name}x{larger.gpus}" + (
            f" as {larger.data}x{larger.split}" if larger.data > 1 else ""
        )
        yield Remedy(about=about, setting=larger, peak=sizes_of(larger).peak)


def _with_smaller_budget(setting: Setting, policy: Method, budget: int) -> Setting | None:
    """Setting with the largest budget of `policy` that fits, in steps of 64 from 128 to `budget`; None if none fits."""

    def changed(steps: int) -> Setting | None:
        try:
            return dataclasses.replace(
                setting, policy=with_budget(policy, min(budget, steps * _STEP))
            )
        except ValueError:
            return None

    def fit(steps: int) -> bool:
        made = changed(steps)
        return made is not None and fits(made)

    if not fit(_LEAST_BUDGET // _STEP):
        return None
    found = changed(largest(fit, -(-budget // _STEP)))
    return found if found is not None and fits(found) else None


def _with_more_gpus(setting: Setting) -> Setting | None:
    """Setting with 2, 4, 8 or 16 times the GPUs (as larger or more groups), the fewest that fit; None if none fits."""
    for times in (2, 4, 8, 16):
        for data in dict.fromkeys((setting.data, setting.data * times)):
            try:
                more = dataclasses.replace(setting, gpus=setting.gpus * times, data=data)
            except ValueError:
                continue
            if data <= setting.batch and fits(more):
                return more
    return None
