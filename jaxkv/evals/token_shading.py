"""Tokens of one sample's prompt, and how many kv heads keep each after prefill, for the report's shading."""

from collections.abc import Sequence
from typing import Any

from jaxkv.generation import prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy
from jaxkv.text.shown import pieces_of
from jaxkv.text.tokenizer import Text

# Number of tokens shown at each end of a longer prompt.
_EITHER_END = 500


def held(
    params: LanguageModel, policy: Policy, ids: Sequence[int], *, seed: int = 0
) -> dict[str, Any]:
    """Return a `Record.held`: texts of a prompt's tokens, and how many kv heads keep each after prefill.

    Args:
        params: the model.
        policy: compression policy.
        ids: token ids of the prompt.
        seed: seed of a policy that uses random numbers.

    Returns:
        Number of "tokens", and of kv "heads" over the compressed layers; whether the policy "chooses" what each new
        token reads, evicts entries "later" as well, or "merges" them. If it evicts entries, also the kept "share", and
        "ends": texts and counts of the shown tokens, for long prompts those of both ends.
    """
    cache, parts = prefill(params, [ids], policy=policy, key=seed, progress=False), policy.parts()
    heads = len(cache.compressed_layers) * cache.config.kv_heads
    said: dict[str, Any] = {
        "heads": heads,
        "chooses": not parts.read.everything,
        "later": parts.ongoing.compresses,
        "merges": parts.merge is not None,
        "tokens": len(ids),
        "ends": [],
        "share": None,
    }
    if parts.drops:
        counts = cache.counts()[0].tolist()
        said["share"] = sum(counts) / (heads * len(ids))
        said["ends"] = ends_of(ids, counts, params.tokenizer)
    return said


def ends_of(ids: Sequence[int], counts: Sequence[int], text: Text) -> list[list[Any]]:
    """Return [texts, counts] of a prompt's tokens, or of both ends of a long one."""
    ends = [slice(None)]
    if len(ids) > 2 * _EITHER_END:
        ends = [slice(_EITHER_END), slice(-_EITHER_END, None)]
    return [[pieces_of(ids[end], text).texts, list(counts[end])] for end in ends]
