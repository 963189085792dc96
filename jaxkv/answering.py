"""Runs one `generate` call: prefills prompts or reads them on top of a cache, then draws tokens block by block."""

import dataclasses
import sys
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxkv import hosts
from jaxkv.cache import KVCache
from jaxkv.compilation import tell_if_slow
from jaxkv.engine.drawing import Drawing
from jaxkv.engine.lengths import LOOK
from jaxkv.engine.session import Session
from jaxkv.results import Answers, Completion, Generation, Stats
from jaxkv.sampling import Sampler
from jaxkv.sharding.mesh import host
from jaxkv.text.prompts import Encoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Validated arguments of one `generate` call: session, encoded prompts, cache and options.

    `interval` is the number of tokens after each of which new text is yielded; None yields no text. `look` is called
    with the cache before the first token is drawn, which gives up the cache's buffers.
    """

    session: Session
    encoded: Encoded
    cache: KVCache | None
    max_new_tokens: int
    sampling: Sampler
    stops: tuple[str, ...]
    stop_at_eos: bool
    interval: int | None
    progress: bool | None
    look: Callable[[KVCache], object] | None = None


def bar(progress: bool | None, total: int, title: str) -> tqdm:
    """`tqdm` progress bar on stderr, only in the first process; with `progress` None, only on a terminal."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(
        total=total,
        desc=title,
        leave=False,
        disable=not (shown and hosts.speaks()),
        file=sys.stderr,
    )


def answered(call: Call) -> Generator[list[str], None, Generation]:
    """Generator that runs one `generate` call: yields new texts if requested, returns the `Generation`."""
    session, params, encoded = call.session, call.session.params, call.encoded
    cache, sizes = _read(call)
    if call.look is not None:
        call.look(cache)
    eos = params.ends if call.stop_at_eos else ()
    drawing = session.drawing(cache, new=call.max_new_tokens, sampling=call.sampling, eos=eos)
    answers = Answers(params.text, len(encoded.ids), call.stops)
    yield from _drawn(call, drawing, answers)
    with session.clocks.decode:
        cache = drawing.close()
        jax.block_until_ready(cache.pools)
    cache = session.compress_again(cache)
    closing = answers.flush()
    if call.interval is not None and any(closing):
        yield closing
    made = answers.completions(eos)
    names = [field.name for field in dataclasses.fields(Completion)]
    fields: dict[str, Any] = {name: [getattr(each, name) for each in made] for name in names}
    if encoded.single:
        fields = {name: each for name, (each,) in fields.items()}
    elif params.text is None:
        fields["text"] = None
    return Generation(
        **fields,
        cache=dataclasses.replace(cache, turn=encoded.turn, logits=None),
        stats=_stats(call, cache, sizes, answers, drawing),
    )


def _read(call: Call) -> tuple[KVCache, dict[str, Any]]:
    """Prefills the prompts, or reads them on top of the given cache; returns the cache and its sizes for `Stats`."""
    session, encoded, given, new = call.session, call.encoded, call.cache, call.max_new_tokens
    if given is not None:
        # Read before the cache is extended.
        sizes = _sizes(given, given.nbytes)
        return session.extend(given, encoded, new=new), sizes
    needed = session.plan(encoded.lengths, new)
    with bar(call.progress, session.params.config.layers, "prefill") as shown:
        cache = session.prefill(encoded, new=new, needed=needed, tick=shown.update)
    spare = len(cache.seen) * cache.room_nbytes(needed.room)
    return cache, _sizes(cache, cache.nbytes - spare)


def _sizes(cache: KVCache, weighs: int) -> dict[str, Any]:
    """Fields of `Stats` for a cache of `weighs` bytes after prefill."""
    entries = {"full_bytes": cache.full_nbytes, "kept_bytes": cache.kept_nbytes}
    return entries | {"cache_bytes": weighs, "kept": float(np.mean(cache.kept))}


def _drawn(call: Call, drawing: Drawing, answers: Answers) -> Generator[list[str], None, None]:
    """Generator that draws tokens until all sequences have ended; yields each sequence's new text if requested."""
    axes = call.session.params.axes
    with bar(call.progress, call.max_new_tokens, "decode") as shown:
        # Only one of several processes shows the bar, but all must draw blocks of the same size.
        look = (
            bool(call.stops) or not shown.disable or (axes is not None and hosts.spans(axes.mesh))
        )
        # Rows after a stop string are rolled back; with eviction or rescoring that is impossible: one token per block.
        pace = 1 if call.stops and drawing.final else LOOK if look else drawing.size
        interval = call.interval or drawing.left
        ended, wanted = False, interval
        while drawing.left and not ended:
            with call.session.clocks.decode:
                drawn = drawing.draw(min(drawing.left, pace, wanted))
                drawing.take_back(answers.take(drawn))
                drawing.end(answers.stopped)
                ended = bool(drawing.done.all())
            shown.update(drawn.shape[1])
            wanted -= drawn.shape[1]
            if call.interval is not None and (ended or not drawing.left or wanted < 1):
                yield answers.fresh()
            wanted = wanted or interval


def _stats(
    call: Call, cache: KVCache, sizes: dict[str, Any], answers: Answers, drawing: Drawing
) -> Stats:
    """`Stats` of one `generate` call, from its clocks, cache sizes and transfers; logs slow compilation once."""
    session, given = call.session, call.cache
    clocks, reading = session.clocks, drawing.reading
    moved, cut = _tallied(cache)
    tell_if_slow(clocks.compile_seconds)
    if given is not None:
        # The given cache's sequences may be repeated.
        before = [rows * cache.batch // given.batch for rows in _tallied(given)]
        moved, cut = moved - before[0], cut - before[1]
    return Stats(
        **sizes,
        prompt_tokens=int(call.encoded.lengths.sum()),
        new_tokens=sum(len(tokens) for tokens in answers.tokens),
        prefill_seconds=clocks.prefill.seconds,
        decode_seconds=clocks.decode.seconds,
        compile_seconds=clocks.compile_seconds,
        compiled_programs=clocks.programs,
        allocated_bytes=cache.nbytes,
        attention=str(session.implementations),
        layout=cache.layout.value,
        decode_steps=call.max_new_tokens - drawing.left,
        host_bytes=cache.host_nbytes,
        transfers=session.drawn.transfers,
        transferred_bytes=session.drawn.bytes,
        loaded_bytes=session.read.bytes,
        filter_layers=() if reading is None else reading.filters,
        moved_rows=moved,
        cut_rows=cut,
        raised_budgets=0
        if given is not None
        else session.policy.composed.raised(call.encoded.lengths),
    )


def _tallied(cache: KVCache) -> tuple[int, int]:
    """Counts (moved, cut) over all sequences: rows that `capacity` moved to other devices, rows that the budget cut."""
    moved, cut = (
        0 if each is None else int(host(each)[: cache.batch].sum())
        for each in (cache.moved, cache.cut)
    )
    return moved, cut
