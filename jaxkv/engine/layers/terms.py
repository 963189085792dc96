"""`DecodeAttentionConfig`: static config of how new tokens are appended and attend to the entries of a layer."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import AttentionBackend, Implementation, get_attention_backend
from jaxkv.cache.layout import SegmentLayout
from jaxkv.policies.parts import DecodingCompressionConfig
from jaxkv.policies.reads import LayerReadConfig
from jaxkv.sharding.mesh import ShardingMesh


@frozen_dataclass
class DecodeAttentionConfig:
    """Static, hashable config of decode attention over a layer's entries: layout, parts of the policy, backend.

    Attributes:
        layout: layout of segments in their pools.
        reading: which layers are filter layers, and which attend to their selections.
        ongoing: what the policy does after each token.
        widest: maximum number of entries per segment of a shared pool in a decode step; None if unknown.
        implementation: implementation of attention over the pool.
    """

    layout: SegmentLayout
    reading: LayerReadConfig
    ongoing: DecodingCompressionConfig = DecodingCompressionConfig()
    widest: int | None = None
    implementation: Implementation = Implementation.XLA

    @property
    def backend(self) -> AttentionBackend:
        """Backend that computes attention over the pool, from `implementation`."""
        return get_attention_backend(self.implementation)

    @property
    def axes(self) -> ShardingMesh | None:
        """`ShardingMesh` that decode programs run on; None without a mesh, and always None in this base class."""
        return None

    @property
    def uses_attention_scores(self) -> bool:
        """True if entries' scores include the attention they receive during decoding."""
        return self.ongoing.updates_scores

    @property
    def score_decay(self) -> float:
        """Factor by which entries' scores are multiplied at each new token; 1 if attention does not change scores."""
        decay = self.ongoing.rank.decay if self.uses_attention_scores else None
        return 1.0 if decay is None else decay
