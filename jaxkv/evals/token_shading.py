"""Tokens of one sample's prompt, and how many kv heads keep each after prefill, for the report's shading."""

from collections.abc import Sequence
from typing import Any

from jaxkv.generation import prefill
from jaxkv.loading import LanguageModel
from jaxkv.policies.policy import Policy
from jaxkv.text.shown import decode_token_texts
from jaxkv.text.tokenizer import ChatTokenizer

# Number of tokens shown at each end of a longer prompt.
_EITHER_END = 500


def count_keeping_heads(
    params: LanguageModel, policy: Policy, ids: Sequence[int], *, seed: int = 0
) -> dict[str, Any]:
    """Prefill a prompt; return its `SampleRecord.held` dict: sizes, flags; if compressed, texts, heads by token, share.

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
    cache = prefill(params, [ids], policy=policy, key=seed, progress=False)
    parts = policy.build_policy_parts()
    heads = len(cache.compressed_layers) * cache.config.kv_heads
    said: dict[str, Any] = {
        "heads": heads,
        "chooses": not parts.read.reads_all_entries,
        "later": parts.decoding_compression.compresses,
        "merges": parts.merge is not None,
        "tokens": len(ids),
        "ends": [],
        "share": None,
    }
    if parts.compresses_prompts:
        counts = cache.counts()[0].tolist()
        said["share"] = sum(counts) / (heads * len(ids))
        said["ends"] = select_prompt_ends(ids, counts, params.tokenizer)
    return said


def select_prompt_ends(
    ids: Sequence[int], counts: Sequence[int], text: ChatTokenizer
) -> list[list[Any]]:
    """Return [token texts, counts] pairs: one of the prompt or, above 1,000 tokens, one of 500 tokens per end."""
    ends = [slice(None)]
    if len(ids) > 2 * _EITHER_END:
        ends = [slice(_EITHER_END), slice(-_EITHER_END, None)]
    return [[decode_token_texts(ids[end], text).texts, list(counts[end])] for end in ends]
