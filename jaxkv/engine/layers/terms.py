"""`Terms`: static config of how new tokens are appended and attend to the entries of a layer."""

import dataclasses

from jaxkv.attention import Backend, Implementation, backend_of
from jaxkv.cache.layout import Layout
from jaxkv.policies.parts import Ongoing
from jaxkv.policies.reads import Reading
from jaxkv.sharding.mesh import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Static, hashable config of a layer's entries, for any model: layout, parts of the policy, backend.

    Attributes:
        layout: layout of segments in their pools.
        reading: which layers are filter layers, and which attend to their selections.
        ongoing: what the policy does after each token.
        widest: maximum number of entries per segment of a shared pool in a decode step; None if unknown.
        implementation: implementation of attention over the pool.
    """

    layout: Layout
    reading: Reading
    ongoing: Ongoing = Ongoing()
    widest: int | None = None
    implementation: Implementation = Implementation.XLA

    @property
    def backend(self) -> Backend:
        """Backend that computes attention over the pool, from `implementation`."""
        return backend_of(self.implementation)

    @property
    def axes(self) -> Axes | None:
        """Axes of the mesh that the programs run on; None without a mesh."""
        return None

    @property
    def scored(self) -> bool:
        """True if entries' scores include the attention they receive during decoding."""
        return self.ongoing.attends

    @property
    def decay(self) -> float:
        """Factor of an entry's score at each new token; 1 if attention does not change scores."""
        decay = self.ongoing.rank.decay if self.scored else None
        return 1.0 if decay is None else decay
