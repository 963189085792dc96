"""`plan`: whether a model, a policy and prompts fit on devices, what fits at most, and which changes help."""

import bisect
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from jaxkv._checks import validate_bool
from jaxkv._errors import require
from jaxkv.cache.stores import choose_cache_dtype
from jaxkv.engine.lengths import list_buckets
from jaxkv.engine.slot_shape import compute_slot_shape
from jaxkv.loading import LanguageModel, validate_dtype
from jaxkv.machine import memory
from jaxkv.models.config import ModelConfig
from jaxkv.planning.accelerators import Device
from jaxkv.planning.catalog import KnownModel, apply_rope_scaling, model_named
from jaxkv.planning.compiled import compile_plan
from jaxkv.planning.memory_sizes import compute_memory_sizes
from jaxkv.planning.named import parse_accelerators
from jaxkv.planning.plans import Plan, Remedy, ServingPlan
from jaxkv.planning.setting import Workload, parse_token_count
from jaxkv.planning.speed import estimate_speed, explain_missing_rate
from jaxkv.policies.checks import EntryBudget
from jaxkv.policies.methods.snapkv import SnapKV
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy
from jaxkv.policies.wrapper import replace_policy_budget
from jaxkv.serving.slot_memory import get_max_prefills_ahead
from jaxkv.sharding.mesh_argument import parse_mesh_sizes

# Remedies propose at least _LEAST_BUDGET entries, and _USUAL_BUDGET for policies that keep all entries.
_LEAST_BUDGET = 128
_USUAL_BUDGET = 2048
# Share of a GPU's memory that JAX preallocates by default.
_PREALLOCATED = 0.75
_FEW = 8
_MOST_BATCH = 1 << 16


def plan(
    model: str | os.PathLike[str] | ModelConfig | LanguageModel,
    *,
    gpus: str = "h100x8",
    mesh: str | tuple[int, int] | None = None,
    context: int | str,
    batch: int = 1,
    new: int = 256,
    questions: int = 1,
    policy: Policy | type[Policy] | str | None = None,
    dtype: Any = None,
    weights: Any = None,
    rope_scaling: str | None = None,
    serve: bool = False,
    compile: bool = False,
) -> Plan:
    """Plan memory and speed of prompts on GPUs or TPUs, present or not, or on this machine's CPU; return a `Plan`.

    Args:
        model: a name of the catalogue such as `llama-3.1-70b`, a folder, a `.gguf` file or a hub id, whose config alone
            is read; or a config, or a loaded model.
        gpus: kind and number of GPUs or TPUs: `h100x8`, `8xh100` or `v6e:8`; `cpu` for a process on this machine.
        mesh: data-parallel groups of GPUs, and GPUs per group: `2x4` or `(2, 4)`; by default one group of all.
        context: tokens of each prompt: a number, or a text such as `128K`, where K is 1024.
        batch: number of prompts.
        new: number of tokens to sample after each prompt.
        questions: requests per prompt; they share its prefill in seconds and in requests per hour.
        policy: compression policy, or its name or class; FullKV() keeps every entry.
        dtype: dtype of weights, activations and cache; by default bfloat16 on GPUs and float32 on a CPU.
        weights: "int8" or "int4" to quantise linear maps, as in `jaxkv.load`.
        rope_scaling: "yarn:4" for four times the model's positions by YaRN, as in a config.json's `rope_scaling`.
        serve: also plan an `Engine`: the slots that fit, and the requests of this length that they answer per hour.
        compile: also run XLA's compiler, which must be installed; the GPUs need not be present.

    Returns:
        The plan, whose text is the output of `jaxkv plan`.

    Raises:
        ValueError: for an unknown model or GPU, with the nearest names; for a mesh that does not divide the model, a
            context beyond its positions, or a budget that cannot be kept.
        TypeError: for an argument of the wrong type.
        ImportError: if the compiler is needed and not installed, with the command to install it.
    """
    known = apply_rope_scaling(resolve_model(model), rope_scaling)
    notes = list[str]()
    if isinstance(gpus, str) and gpus.strip().lower() == "cpu":
        gpu = Device(name="cpu", memory=memory.get_machine_bytes())
        count = 1
    else:
        gpu, count = parse_accelerators(gpus)
    here = gpu.platform == "cpu"
    require(not (here and compile), "compile", compile, "not supported on a CPU: leave it out")
    given = resolve_policy(policy)
    filters = known.filters
    if filters is None and getattr(given, "filter_layers", ()) is None:
        filters = known.likely_filter_layers
        layers = ", ".join(map(str, filters))
        notes.append(f"filter layers {layers} are assumed; `jaxkv filters` finds those of a model")
    dtype = validate_dtype(("float32" if here else "bfloat16") if dtype is None else dtype).name
    setting = Workload(
        model=known.name,
        config=known.config,
        policy=resolve_policy_for_model(
            given, known.config, filters, dtype=choose_cache_dtype(dtype, gpu.platform)
        ),
        batch=batch,
        context=parse_token_count(context),
        new=new,
        dtype=dtype,
        weights=weights,
        questions=questions,
        gpu=gpu,
        gpus=count,
        data=_count_groups(mesh, count),
    )
    sizes = compute_memory_sizes(setting)
    most = find_largest_batch(setting)
    notes += [setting.position_warning] if setting.position_warning else []
    enough = sizes.peak_device_bytes <= gpu.memory
    if enough and gpu.platform == "cuda" and sizes.peak_device_bytes > _PREALLOCATED * gpu.memory:
        notes.append("JAX uses three quarters of a GPU: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")
    return Plan(
        setting=setting,
        sizes=sizes,
        largest_batch=most,
        largest_context=find_largest_context(setting),
        remedies=() if enough else tuple(_find_remedies(setting)),
        speed=estimate_speed(setting) if enough else None,
        fastest=estimate_speed(dataclasses.replace(setting, batch=most)) if most else None,
        silent=explain_missing_rate(setting) if enough else "it does not fit",
        served=plan_serving(setting) if validate_bool("serve", serve) else None,
        notes=tuple(notes),
        compiled=compile_plan(setting) if compile else None,
    )


def resolve_model(given: Any) -> KnownModel:
    """Return the `KnownModel` of a model name, path, `ModelConfig` or loaded model; TypeError for others."""
    if isinstance(given, LanguageModel):
        return KnownModel(name=given.name, config=given.config, filters=given.filter_layers)
    if isinstance(given, ModelConfig):
        return KnownModel(name=f"a model of {given.layers} layers", config=given)
    if not isinstance(given, (str, os.PathLike)):
        kind = type(given).__name__
        raise TypeError(
            f"model={kind}: not a model: use a name such as 'llama-3.1-70b', a path or a config"
        )
    return model_named(given)


def _count_groups(mesh: Any, count: int) -> int:
    """Return how many data-parallel groups a mesh has, 1 if None; ValueError unless it has `count` devices."""
    if mesh is None:
        return 1
    text = "x".join(map(str, mesh)) if isinstance(mesh, (tuple, list)) else str(mesh)
    data, split = parse_mesh_sizes("".join(text.lower().split()), "mesh")
    remedy = f"it must have {count} GPUs: use groups and GPUs per group, such as 1x{count}"
    require(data * split == count, "mesh", mesh, remedy)
    return data


def plan_serving(setting: Workload) -> ServingPlan | str:
    """Plan how many engine slots fit a workload's prompts; return a `ServingPlan`, or the text why none is possible."""
    config = setting.config
    parts = setting.policy.composed
    groups = setting.data
    try:
        shape = compute_slot_shape(
            parts,
            config,
            prompt=setting.context,
            question=0,
            new=max(1, setting.new),
            kv_shards=setting.mesh.shape["kv"],
        )
    except ValueError as error:
        return str(error)
    one = dataclasses.replace(setting, batch=groups)
    alone = compute_memory_sizes(one)
    itemsize = jnp.dtype(setting.dtype).itemsize
    each = shape.compute_slot_bytes(parts, setting.local_config, itemsize)

    def fit(count: int) -> bool:
        # Next to the slots: one prefill, and prompts per group that wait for slots.
        every = compute_memory_sizes(dataclasses.replace(one, batch=count * groups))
        held = (count + get_max_prefills_ahead(count * groups)) * each
        return alone.weights + alone.process + alone.prefill + every.decode + held <= one.gpu.memory

    slots = groups * find_largest_integer(fit)
    full = estimate_speed(dataclasses.replace(one, batch=slots)) if slots else None
    first = estimate_speed(one)
    if first is None or full is None:
        return ServingPlan(slots=slots, slot_bytes=each)
    # A request uses the devices for its prefill and for its share of the steps of all slots.
    seconds = first.prefill / setting.questions + setting.new * full.step / slots
    pause = 2 * first.prefill / config.layers + full.step
    return ServingPlan(slots=slots, slot_bytes=each, requests=3600 / seconds, pause=pause)


def has_enough_memory(setting: Workload, **changes: Any) -> bool:
    """Return True if a workload with some fields changed fits its device's memory; False for an invalid one."""
    try:
        changed = dataclasses.replace(setting, **changes)
        return compute_memory_sizes(changed).peak_device_bytes <= changed.gpu.memory
    except ValueError:
        return False


def find_largest_integer(sound: Callable[[int], bool], low: int = 0) -> int:
    """Return the largest integer from `low` to 65,536 for which the monotone predicate `sound` holds, else `low`."""
    return low + bisect.bisect(range(low + 1, _MOST_BATCH + 1), 0, key=lambda n: not sound(n))


def find_largest_batch(setting: Workload) -> int:
    """Return the largest number of prompts of the workload's length that fits, at most 65,536; 0 if none does."""
    # Not monotone for few prompts, which pass the MLP in blocks of one prompt's tokens: 5 may need less than 4.
    few = next(
        (
            each
            for each in range(_FEW * setting.data, 0, -1)
            if has_enough_memory(setting, batch=each)
        ),
        0,
    )
    more = few == _FEW * setting.data
    return (
        find_largest_integer(lambda each: has_enough_memory(setting, batch=each), few)
        if more
        else few
    )


def find_largest_context(setting: Workload) -> int:
    """Return the longest prompt length, the model's limit or a bucket, that fits for the workload's batch; else 0."""
    limit = setting.config.max_positions
    # Not monotone in the length: a short prompt may not allow the budget.
    lengths = [limit, *(slots for _, slots in list_buckets(limit)[-2::-1])]
    return next((each for each in lengths if has_enough_memory(setting, context=each)), 0)


def _find_remedies(setting: Workload) -> Iterator[Remedy]:
    """Yield a `Remedy` per kind of change that lets a workload fit: less budget, SnapKV, quantised weights, more GPUs.

    For policies that keep all entries, the budget is SnapKV's.
    """
    policy = setting.policy
    kept = setting.policy.composed.budget
    rows = kept.value if isinstance(kept, EntryBudget) else 0
    if not setting.policy.composed.compresses_prompts:
        policy = SnapKV()
        rows = 2 * min(_USUAL_BUDGET, setting.context)
    halves = (rows // _LEAST_BUDGET).bit_length()
    kinds: tuple[Iterable[dict[str, Any]], ...] = (
        ({"policy": replace_policy_budget(policy, rows >> by)} for by in range(1, halves)),
        ({"weights": f"int{bits}"} for bits in (8, 4) if setting.weights is None),
        (
            {"gpus": setting.gpus * times, "data": data}
            for times in (2, 4, 8, 16)
            for data in (setting.data, min(setting.data * times, setting.batch))
            if setting.gpu.platform != "cpu"
        ),
    )
    for changes in kinds:
        with contextlib.suppress(ValueError):
            for each in changes:
                if has_enough_memory(setting, **each):
                    changed = dataclasses.replace(setting, **each)
                    about = ", ".join(f"{name}={value}" for name, value in each.items())
                    yield Remedy(
                        about=about,
                        setting=changed,
                        peak=compute_memory_sizes(changed).peak_device_bytes,
                    )
                    break
