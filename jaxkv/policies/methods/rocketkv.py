"""RocketKV: a prompt is compressed as by SnapKV; then each kv head attends to few, small pages of what is left."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.attended import MaxPool
from jaxkv.policies.checks import Budget
from jaxkv.policies.methods.quest import Quest
from jaxkv.policies.methods.snapkv import SnapKV
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register


@register
@frozen_dataclass
class RocketKV(Quest):
    """Keep what SnapKV keeps of a prompt; at each new token a kv head attends to pages of the largest attention.

    A page's attention is estimated for each query head by a softmax over pages, and summed over the heads. In place of
    a page's keys stands their maximum or minimum per channel, by the sign of the summed queries, in the `channels`
    channels in which queries are largest.

    Attributes:
        budget: entries of a layer's cache that a kv head attends to at each token, or a share, as of `Quest`.
        page: entries per page.
        dense_layers: number of layers from the bottom that attend to every entry; sliding-window layers do not count.
        base: a policy (or its name or class) that compresses the prompt first.
        channels: number of channels by which pages are chosen; all if a head has fewer.

    References:
        Behnam et al., RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression,
        arXiv:2502.14051; defaults of TensorRT-LLM. The softmax is over full pages: the newest page is always included.
    """

    budget: Budget = 256
    page: int = 4
    dense_layers: int = 0
    base: Policy | type[Policy] | str | None = SnapKV(budget=2048, pooling=MaxPool(63))
    channels: int = 128

    paper = "RocketKV, arXiv:2502.14051"
