"""`Spec`: what programs that run on top of a cache are compiled for, besides shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._errors import require
from jaxkv.attention import (
    PREFILL_ONLY,
    Backend,
    Implementation,
    Implementations,
    backend_of,
    capability_of,
    choose,
    named,
)
from jaxkv.cache import KVCache, State
from jaxkv.cache.layout import Layout
from jaxkv.engine.plan import widest
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Flat, Graphs
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.reading import WHOLE, Reading
from jaxkv.sharding.mesh import Axes


def reading_state(
    prompt: Int[np.ndarray, " B"] | Int[Array, " B"],
    reads: Int[np.ndarray, " B"] | Int[Array, " B"],
    choosable: Int[Array, "L B K"],
    rings: tuple[Float[Array, "B K G R D"], ...] = (),
) -> State:
    """Makes the `State` of a policy that keeps all rows and reads only some of them (OmniKV).

    Args:
        prompt: tokens of each prompt.
        reads: how many of them are read.
        choosable: rows of each prompt's segments that lie on the device.
        rings: the filters' last queries.

    Returns:
        The state behind the prompts.
    """
    return State(
        prompt=jnp.asarray(prompt, jnp.int32),
        budget=jnp.asarray(reads, jnp.int32),
        recent=jnp.zeros(choosable.shape[:2], jnp.int32),
        choosable=jnp.copy(choosable),
        rings=rings,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What decode programs are compiled for, besides shapes.

    Attributes:
        graphs: the decoder's static half.
        config: its shape.
        layout: how segments lie in their pools.
        rolling: positions are those within the cache.
        tail: new rows gather beside the pool while tokens are drawn, and join it later. XLA cannot write into a 16-bit
            pool in place on a CPU, so there one write for many tokens beats one per token.
        ongoing: what the policy does after each token; None if it only appends.
        reading: which layers read what; None if all read everything.
        widest: the most rows a segment of a shared pool can have when a token is drawn; None if unknown.
        implementation: what computes attention over the pool.
        fused: kernels may read and write rows as they are held.
    """

    graphs: Graphs
    config: ModelConfig
    layout: Layout
    rolling: bool
    tail: bool = False
    ongoing: Ongoing | None = None
    reading: Reading | None = None
    widest: int | None = None
    implementation: Implementation = Implementation.XLA
    fused: bool = True

    @property
    def backend(self) -> Backend:
        """Functions that compute attention over the pool."""
        return backend_of(self.implementation)

    @property
    def axes(self) -> Axes | None:
        """Of the mesh that it runs on, if it does."""
        return self.graphs.axes

    def graphs_of(self, layer: int) -> Graphs:
        """The decoder's static half for one layer: equal where layers are alike."""
        return self.graphs.of(self.config.spec_of(layer))

    @property
    def scored(self) -> bool:
        """Whether the attention that rows receive enters their scores."""
        return self.ongoing is not None and self.ongoing.attends

    @property
    def evicts(self) -> bool:
        """Whether a row goes for each that comes."""
        return self.ongoing is not None and self.ongoing.evicts

    def streams(self, tokens: int) -> bool:
        """True if the backend's fused functions run a step of so many tokens: `decode_token`, and `add_norm`."""
        fused = self.backend.fused_step and self.config.alternates and self.fused
        return fused and tokens == 1 and not (self.reading and self.reading.offloaded)

    def chooses(self, layer: int, tokens: int) -> bool:
        """Whether a layer chooses what those above it read when so many tokens come at once."""
        return self.reading is not None and layer in self.reading.filters and (tokens == 1 or self.reading.several)

    def sparse(self, layer: int, tokens: int) -> bool:
        """Whether a layer reads only what was chosen when so many tokens come at once."""
        reading = self.reading
        return reading is not None and reading.sources[layer] != WHOLE and (tokens == 1 or reading.several)

    def ring_of(self, layer: int) -> int | None:
        """Which of the cache's rings is this layer's, if any."""
        if self.ongoing is not None and self.ongoing.queries:
            return layer
        if self.reading is not None and self.reading.ring and layer in self.reading.filters:
            return self.reading.filters.index(layer)
        return None

    @property
    def compares_keys(self) -> bool:
        """Whether a dropped row's key is compared with the others'."""
        merge = None if self.ongoing is None or not self.ongoing.evicts else self.ongoing.merge
        return merge is not None and "k" in merge.compares

    @property
    def knows_norms(self) -> bool:
        """True if key norms are kept from step to step, for mergers that compare a dropped key with all others."""
        # A fused step appends rows by itself, and tells nobody how long their keys are.
        return self.compares_keys and self.backend.keeps_norms and not self.streams(1)

    @property
    def looks_ahead(self) -> bool:
        """True if attention also multiplies all keys with that of the row likely to be dropped: one pass, not two."""
        known = self.layout.one_pool and self.widest is not None and self.scored and not self.rolling
        return self.knows_norms and known


def spec_for(flat: Flat, cache: KVCache, implementation: Implementation = Implementation.XLA) -> Spec:
    """Makes the spec of programs on top of a cache, where that lies, from its handle; reads no array.

    Args:
        flat: the decoder's parameters.
        cache: any cache of this decoder.
        implementation: what computes attention over its segments.

    Returns:
        What is static about it.
    """
    return specialise(
        flat,
        cache.policy.parts(),
        cache.pools[0].k.dtype,
        slots=cache.slots,
        extended=cache.extended,
        banked=cache.bank is not None,
        implementation=implementation,
    )


def specialise(
    flat: Flat,
    parts: Parts,
    dtype: jnp.dtype,
    *,
    slots: int,
    extended: bool = False,
    banked: bool = False,
    platform: str | None = None,
    implementation: Implementation = Implementation.XLA,
) -> Spec:
    """Makes the spec of programs on top of caches of a policy.

    Args:
        flat: the decoder's parameters.
        parts: of the policy.
        dtype: of pools.
        slots: the prompts' bucket, for policies that remember prompts.
        extended: segments may hold more rows than the policy keeps of prompts, see `KVCache.extended`.
        banked: rows wait in host memory.
        platform: where it will run; by default where the model lies.
        implementation: what computes attention over the cache's segments.

    Returns:
        What is static about it.
    """
    ongoing, most = parts.ongoing, None
    reading = parts.reading(flat.config.layers, slots)
    if ongoing is not None and parts.layout.one_pool and not extended:
        most = widest(parts, slots, flat.config.layers)
    if platform is None:
        platform = jax.default_backend() if flat.axes is None else flat.axes.platform
    # Scores and dropped rows are the pool's own business: rows cannot wait beside it.
    settled = not banked and (reading is None or not reading.include_generated)
    appends = settled and (ongoing is None or not (ongoing.evicts or ongoing.scored))
    # A fused step appends to the pool while it attends.
    beside = platform == "cpu" and dtype.itemsize == 2 and not backend_of(implementation).fused_step
    return Spec(
        graphs=flat.graphs,
        config=flat.config,
        layout=parts.layout,
        rolling=parts.rolling,
        tail=beside and appends,
        ongoing=ongoing,
        reading=reading,
        widest=most,
        implementation=implementation,
        fused=parts.store.fused,
    )


def implementations_for(params: LanguageModel, policy: Method, asked: Implementation) -> Implementations:
    """What computes attention in prefill and in decoding, where a model lies; chunks of prompts are read as questions.

    Args:
        params: the model.
        policy: the compression.
        asked: what the user asked for, AUTO for the fastest.

    Returns:
        Both implementations.

    Raises:
        ValueError: for one that cannot read prompts in chunks, under a policy that does.
    """
    read, axes = policy.parts().read, params.axes
    device = jax.devices()[0] if axes is None else axes.mesh.devices.flat[0]
    chosen = choose(
        asked,
        platform=jax.default_backend() if axes is None else axes.platform,
        dtype=params.dtype,
        head_dim=params.config.head_dim,
        capability=capability_of(device),
    )
    if read is None or not read.by_chunks:
        return chosen
    remedy = "chunks attend to the cache, which this does not: leave it out"
    require(named(asked) not in PREFILL_ONLY, "implementation", asked, remedy)
    return dataclasses.replace(chosen, prefill=chosen.decode)
