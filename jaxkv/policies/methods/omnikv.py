"""OmniKV: every entry is kept; filter layers choose the tokens that the layers above them read; and its baseline."""

import dataclasses

from jaxkv._errors import require
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import FilteredReads, LoadedReads, Selector
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Reader


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniKV(Reader):
    """Keeps every entry; a few filter layers choose, for every new token, the tokens that layers above them read.

    Attributes:
        filter_layers: layers that choose, by their index in the model; None takes those found for the model, which its
            manifest names. Layers with a window neither choose nor read a choice.
        budget: int: tokens of the prompt that the other layers read. float in (0, 1]: that share of each sequence's
            own prompt. By default 1024. Tokens after the prompt are read besides. At least the window, if it counts: a
            smaller number is rejected, a smaller share of a short prompt becomes the window.
        mem: the paper's Mem% in place of a budget: the share of the cache that layers which read everything hold, and
            the others' tokens, at least the window as above.
        selector: `Selector`, or its value: which queries choose.
        window: newest tokens whose queries choose, unless only the last one's does.
        adjacent: number of layers above a filter that read everything, while chosen entries are being loaded; layers with
            a window do not count, nor do they for `mem`.
        include_generated: tokens after the prompt are read only if they are chosen as well.
        offload: entries of the layers that read chosen tokens wait in host memory.
        prefill_ratio: None runs prompts through full attention. Otherwise prompts go chunk by chunk, and those layers
            read this many chosen earlier tokens for each token of the chunk, and the chunk.
        prefill_chunk: number of tokens of a chunk.
        base: a policy (or its name or class) that compresses the prompt first; its heads read those of their kept entries
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

    paper = "OmniKV, ICLR 2025"

    read_by = FilteredReads

    def _check(self) -> None:
        super()._check()
        generated, remedy = (
            self.include_generated,
            "the base's choice is the prompt's: leave one out",
        )
        once = self.inner is None or not generated
        require(once, "include_generated", generated, remedy)

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> Policy:
        """Returns this policy, filter layers set to `found` if it has none, base adapted; ValueError without any."""
        if self.filter_layers is not None:
            return super().for_model(layers, found)
        remedy = "none have been found for this model: `jaxkv filters` finds them; give filter_layers=(2, 8, 18), say"
        require(found is not None, "filter_layers", None, remedy)
        return dataclasses.replace(self, filter_layers=found).for_model(layers, found)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BrutalOffload(Policy):
    """Keeps every entry, upper layers' in host memory, loaded whole for every token: OmniKV's baseline.

    Attributes:
        resident_layers: layers from the bottom whose entries stay on the device, besides all layers with a window.
        ahead: number of layers by which loads are started ahead of use.

    References:
        OmniKV, section 5.2 ("Brutal Offload": the final 20 of 32 layers, 4 layers ahead); its code keeps 10 layers.
    """

    resident_layers: int = 10
    ahead: int = 4

    paper = "OmniKV, ICLR 2025, section 5.2"

    def parts(self) -> Parts:
        """Config `Parts`: every entry is kept, and upper layers' entries are loaded from host memory."""
        return self.compose(scorer=None, read=self.part(LoadedReads))
