"""SimLayerKV: layers that look far back keep every row, lazy ones the first and the most recent rows."""

import dataclasses

from jaxkv._checks import field, whole
from jaxkv.policies.checks import Budget
from jaxkv.policies.keep import Keep
from jaxkv.policies.lazy import LazyLayers, Recency
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimLayerKV(Method):
    """Keeps every row in layers that look far back; in lazy layers, which do not, the first and most recent rows.

    The published method compares each layer with a threshold, so that the text decides how large a cache becomes. Here
    the budget decides how many layers are lazy, and the comparison which ones. All layers' rows are held until the last
    one has been looked at. Tokens after the prompt are appended.

    A prompt of no more than `sinks` + `recent` tokens is kept whole, whatever its share.

    Attributes:
        window: number of the prompt's last queries by whose attention layers are compared.
        sinks: first tokens that stay in every layer.
        recent: most recent tokens that stay in every layer.

    References:
        Zhang et al., SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, arXiv:2410.13846.
    """

    budget: Budget = 0.5
    window: int = 32
    sinks: int = 4
    recent: int = 1024

    paper = "SimLayerKV, arXiv:2410.13846"

    def _check(self) -> None:
        field(self, "window", whole, "give at least 1 last query")

    def parts(self) -> Parts:
        """Config `Parts`: layers that look back furthest keep all rows, others sinks and recent rows alone."""
        keep = Keep(sinks=self.sinks, window=self.recent)
        layers = self.part(LazyLayers)
        return self.compose(scorer=self.part(Recency), keep=keep, layers=layers)
