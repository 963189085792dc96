"""Number of slots that fit into free memory, and number of prompts that are prefilled ahead."""

from typing import Any

import jax
import numpy as np

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.engine.session import Session
from jaxkv.engine.slot_shape import compute_slot_shape
from jaxkv.loading import LanguageModel
from jaxkv.machine import memory
from jaxkv.models.config import ModelConfig

# Share of the free memory for slots; the rest is for documents and XLA's temporary buffers.
_SHARE = 0.9
# Maximum of "auto". On a CPU, a larger batch gains less than its decode step costs; on GPUs the entries are the limit.
_MOST_ON_CPUS, _MOST = 64, 1024
_USUAL_PROMPT = 4096


def get_max_prefills_ahead(slots: int) -> int:
    """Return how many prompts may be prefilled while all `slots` are taken: a quarter, rounded down, but at least 2."""
    return max(2, slots // 4)


def resolve_token_limits(
    config: ModelConfig, *, prompt: Any, new: Any, question: Any, together: Any
) -> dict[str, int]:
    """Return maximum tokens of prompt, answer, question, prompts together as a dict for `Slots`; ValueError if invalid.

    The default of a prompt is the model's positions less the other limits, at most 4096.
    """
    new = _checks.validate_int("max_new_tokens", new, "sample at least 1 token")
    question = _checks.validate_int(
        "max_question_tokens", question, "use 0 for no questions", least=0
    )
    if prompt is None:
        left = config.max_positions - new - question
        remedy = f"the model has {config.max_positions} positions: leave some for the prompt"
        require(left > 0, "max_new_tokens", new, remedy)
        prompt = min(_USUAL_PROMPT, left)
    prompt = _checks.validate_int("max_prompt_tokens", prompt, "allow prompts of at least 1 token")
    together = _checks.validate_int("prefill_tokens", together, "use at least 1 token")
    return {
        "max_prompt": prompt,
        "max_new_tokens": new,
        "max_question": question,
        "prefill_tokens": together,
    }


def compute_memory_share(left: int, *, promised: int, device: jax.Device) -> float:
    """Return the share of free memory, 1 / `left` of what is not promised, for the next of `left` engines to create.

    `promised` bytes are reserved for the documents of existing engines.
    """
    free = memory.available_bytes(device)
    return max(0.01, 1 - promised / free) / left if free > 0 else 1 / left


@settled
def count_fitting_slots(
    session: Session,
    *,
    max_prompt: int,
    max_new_tokens: int,
    max_question: int,
    prefill_tokens: int = 1,
    share: float = 1.0,
) -> int:
    """Return how many slots, with a prefill and prompts ahead, fit in 0.9 * `share` of free memory.

    The number is at most 64 on a CPU, else 1024, and on a mesh a multiple of its groups. Raises MemoryError, with the
    bytes, if not even one slot per group fits.
    """
    params, parts = session.params, session.policy.build_policy_parts()
    config, axes = params.config, params.axes
    groups, kv_shards = (
        (1, 1) if axes is None else (axes.count_axis_shards("B"), axes.count_axis_shards("K"))
    )
    shape = compute_slot_shape(
        parts,
        config,
        prompt=max_prompt,
        question=max_question,
        new=max_new_tokens,
        kv_shards=kv_shards,
    )
    device = get_model_device(params)
    # Devices of a CPU mesh share the memory of the machine.
    together = 1 if axes is None else axes.devices_sharing_memory
    local = config.get_device_config(axes)
    each = together * shape.compute_slot_bytes(parts, local, params.cache_dtype.itemsize)
    # Prompts that are prefilled together need at most the bytes of one of as many tokens, and a slot each.
    batch = 1 if axes else max(each.batch for each in shape.list_programs(prefill_tokens, _MOST))
    longest = max(max_prompt, min(prefill_tokens, batch * max_prompt))
    # A prompt prefilled ahead waits in the shape of a slot, in each group.
    beside = session.plan_without_memory_check(np.asarray([longest]), 0).peak_bytes
    memory.require_free_bytes(
        beside + each * (1 + get_max_prefills_ahead(groups)),
        "one slot, its queue and a prefill",
        device,
    )
    fit = (int(_SHARE * share * memory.available_bytes(device)) - beside) // each
    made = _MOST_ON_CPUS if device.platform == "cpu" else _MOST
    most = max(
        (
            count
            for count in range(1, made // groups + 1)
            if count + get_max_prefills_ahead(count * groups) + min(count, batch) - 1 <= fit
        ),
        default=1,
    )
    return most * groups


def get_model_device(params: LanguageModel) -> jax.Device:
    """Return the first local device of the model's mesh, or the default device without a mesh."""
    return memory.default_device() if params.axes is None else params.axes.mesh.local_devices[0]
