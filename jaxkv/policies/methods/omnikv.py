"""OmniKV: every entry is kept; filter layers choose the tokens that layers above attend to; and its baseline."""

import dataclasses

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import FilteredReads, OffloadedReads, QueryWeighting
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import SparseReadPolicy


@register
@frozen_dataclass
class OmniKV(SparseReadPolicy):
    """Keep every entry, or those that `base` keeps; filter layers choose, per new token, what layers above attend to.

    They choose anew for each new token.

    Attributes:
        filter_layers: filter layers, by their index in the model; None uses those found for the model, from its
            manifest. Sliding-window layers neither choose nor use a choice.
        budget: int: tokens of the prompt that the other layers attend to. float in (0, 1]: share of each sequence's own
            prompt. Default 1024. Tokens after the prompt are added. At least the window, if it is used: smaller numbers
            are rejected, and smaller shares of short prompts become the window.
        mem: the paper's Mem% instead of a budget: share of the cache that consists of all entries of the layers that
            attend to every entry, and of the other layers' chosen tokens; at least the window, as above.
        selector: `QueryWeighting`, or its value: queries that choose.
        window: number of newest queries that choose, unless only the last one does.
        adjacent: number of layers above a filter layer that attend to every entry, while chosen entries are loaded;
            sliding-window layers do not count, nor for `mem`.
        include_generated: limit attention to tokens after the prompt to chosen ones, too.
        offload: keep entries of the layers that attend to chosen tokens in host memory.
        prefill_ratio: None computes full attention in prefill. Otherwise prefill is chunked, and these layers attend to
            the chunk and to this many chosen earlier tokens per token of the chunk.
        prefill_chunk: tokens per chunk.
        base: a policy (or its name or class) that compresses the prompt first; heads then attend to those of their kept
            entries that are chosen.

    References:
        Hao et al., OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs, ICLR 2025, sections 4 and 5,
        equations 3 and 4, appendix D.10. Unlike its code, window queries are at their own positions, and "last"
        is the paper's: a softmax over the prompt for each head before the maximum.
    """

    filter_layers: tuple[int, ...] | None = None
    mem: float | None = None
    selector: QueryWeighting | str = QueryWeighting.LAST
    window: int = 16
    adjacent: int = 1
    include_generated: bool = False
    offload: bool = False
    prefill_ratio: int | float | None = None
    prefill_chunk: int = 1024

    paper = "OmniKV, ICLR 2025"

    read_by = FilteredReads

    def _check_fields(self) -> None:
        super()._check_fields()
        generated = self.include_generated
        remedy = "the base chooses for the prompt only: leave one out"
        once = self.base_policy is None or not generated
        require(once, "include_generated", generated, remedy)

    def fill_model_fields(self, config: ModelConfig, found: tuple[int, ...] | None) -> Policy:
        """Return OmniKV with filter layers `found` if it has none, base adapted too; ValueError without any."""
        if self.filter_layers is not None:
            return super().fill_model_fields(config, found)
        remedy = "none are known for this model: run `jaxkv filters`, or give filter_layers=(2, 8, 18), for example"
        require(found is not None, "filter_layers", None, remedy)
        return dataclasses.replace(self, filter_layers=found).fill_model_fields(config, found)


@register
@frozen_dataclass
class BrutalOffload(Policy):
    """Keep every entry, those of upper layers in host memory, loaded in full for each token: a baseline.

    Each token loads the upper layers' entries in full.

    Attributes:
        resident_layers: number of layers from the bottom with entries on the device, besides all sliding-window layers.
        ahead: number of layers by which loads start before use.

    References:
        OmniKV, section 5.2 ("Brutal Offload": the final 20 of 32 layers, 4 layers ahead); its code keeps 10 layers.
    """

    resident_layers: int = 10
    ahead: int = 4

    paper = "OmniKV, ICLR 2025, section 5.2"

    def build_policy_parts(self) -> Parts:
        """Return BrutalOffload's `Parts`: keep every entry, load upper layers' from the host for each token."""
        return self.compose(scorer=None, read=self.create_part(OffloadedReads))
