"""Batches of a new size, filled up with copies to a compiled size if that is quicker than compiling."""

import dataclasses

import jax
from jax import lax

from jaxkv import memory
from jaxkv.cache import KVCache
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill import signature_of
from jaxkv.engine.session import Session
from jaxkv.models.decoder import Took
from jaxkv.sharding.mesh import lettered
from jaxkv.text.prompts import Encoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Encoded prompts with copies of the last one that fill up the batch, and prefill plans with and without copies.

    Attributes:
        encoded: the prompts, followed by copies of the last one.
        copies: number of copies, less than that of the prompts.
        needed: the plan of all, copies included.
        asked: the plan of the prompts alone.
    """

    encoded: Encoded
    copies: int
    needed: PrefillPlan
    asked: PrefillPlan


def planned(session: Session, encoded: Encoded, new: int) -> Batch:
    """Makes a `Batch`, filled with copies up to a compiled size if that beats compiling; MemoryError if too large.

    The time that copies take is estimated from the last run of the larger size, the time of compiling from its first. A
    size is filled once: when it comes again, programs are compiled for it. Nothing is filled on a mesh, if prompts are
    read in chunks or rows are offloaded, or if memory is short. Raises MemoryError, naming the plan's bytes, if the
    prompts alone do not fit.
    """
    needed, flat, read = session.plan(encoded.lengths, new), session.params.flat, session.policy.parts().read
    batch = Batch(encoded=encoded, copies=0, needed=needed, asked=needed)
    exact = _signature(session, batch)
    if flat.axes is not None or exact in flat.compiled or exact in flat.filled or (read and read.whole_prompts):
        return batch
    size = len(encoded.ids)
    for larger in range(size + 1, 2 * size):
        copies = larger - size
        filled = dataclasses.replace(batch, encoded=encoded.with_copies(copies), copies=copies)
        took = flat.took.get(_signature(session, filled))
        if took is None or took.seconds * copies / larger >= took.compile_seconds:
            continue
        try:
            every = session.plan(filled.encoded.lengths, new)
            # The cache without copies, which the caller returns, exists beside the filled one.
            memory.check_bytes(every.cache_bytes + needed.cache_bytes, "a filled batch")
        except MemoryError:
            return batch
        flat.filled.add(exact)
        return dataclasses.replace(filled, needed=every)
    return batch


def remember(session: Session, batch: Batch) -> None:
    """Stores a batch's first compile and last seconds on the model, for `planned`; skips batches with copies.

    The session has run this batch and nothing else.
    """
    if batch.copies:
        return
    clocks, took = session.clocks, session.params.flat.took
    signature = _signature(session, batch)
    first = took[signature].compile_seconds if signature in took else clocks.compile_seconds
    took[signature] = Took(first, clocks.prefill.seconds + clocks.decode.seconds)


def _signature(session: Session, batch: Batch) -> tuple:
    """Dictionary key (tuple) of the compiled prefill programs that a batch runs, copies included."""
    implementation = session.implementations.prefill
    flat, size = session.params.flat, len(batch.encoded.ids)
    return signature_of(flat, size, session.policy, batch.asked, implementation=implementation)


def without_copies(cache: KVCache) -> KVCache:
    """`KVCache` without the sequences that only filled its batch; unchanged on a mesh, or if there are none."""
    if not cache.padding or cache.axes is not None:
        return cache
    leaves, tree = jax.tree.flatten(dataclasses.replace(cache, padding=0))
    axes = [letters.split().index("B") for _, letters, _ in lettered(cache)]
    cut = [lax.slice_in_dim(leaf, 0, cache.batch, axis=axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(tree, cut)
