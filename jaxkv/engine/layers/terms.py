"""`Terms`: static config on which new tokens join and read the entries of a layer."""

import dataclasses

from jaxkv.attention import Backend, Implementation, backend_of
from jaxkv.cache.layout import Layout
from jaxkv.policies.parts import Ongoing
from jaxkv.policies.reads import Reading
from jaxkv.sharding.mesh import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Static, hashable config of a layer's entries: their layout, the policy's parts, the backend; of any model.

    Attributes:
        layout: how segments are in their pools.
        reading: which entries layers read: filter layers, and those that read what they choose.
        ongoing: what the policy does after each token.
        widest: the most entries that a segment of a shared pool can have at a decode step; None if unknown.
        implementation: of attention over the pool.
    """

    layout: Layout
    reading: Reading
    ongoing: Ongoing = Ongoing()
    widest: int | None = None
    implementation: Implementation = Implementation.XLA

    @property
    def backend(self) -> Backend:
        """Backend whose functions compute attention over the pool, from `implementation`."""
        return backend_of(self.implementation)

    @property
    def axes(self) -> Axes | None:
        """Axes of the mesh that the programs run on; None off a mesh."""
        return None

    @property
    def scored(self) -> bool:
        """True if, while tokens are sampled, the attention that entries receive enters their scores."""
        return self.ongoing.attends

    @property
    def decay(self) -> float:
        """Factor by which an entry's score is multiplied at each new token; 1 if attention does not change scores."""
        decay = self.ongoing.rank.decay if self.scored else None
        return 1.0 if decay is None else decay
