"""Requests answered over a few slots, and each of them alone: what tests of slots compare."""

import dataclasses

import numpy as np

import jaxkv
from jaxkv.engine.sampling import Sampling
from jaxkv.engine.slots import Slots
from jaxkv.machine.compilation import StageClock

SLOTS, PROMPT, NEW = 4, 64, 24
SAMPLERS = (
    Sampling(temperature=0),
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.8, temperature=1.3),
    Sampling(min_p=0.2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: a prompt, tokens to sample, how, with which seed, and ids that end it."""

    prompt: list
    new: int
    sampling: object
    seed: int
    eos: tuple = ()


def requests(seed, count, *, vocab=64, sampled=False, shortest=17):
    """Random requests, about half of which come to an end token; the samplers take turns."""
    rng = np.random.default_rng(seed)
    return [
        Asked(
            # No id comes twice: rows of one token tie, and are told apart by rounding alone.
            prompt=rng.permutation(vocab)[: rng.integers(shortest, PROMPT + 1)].tolist(),
            new=int(rng.integers(1, NEW + 1)),
            sampling=SAMPLERS[at % len(SAMPLERS)] if sampled else Sampling(temperature=0),
            seed=at,
            eos=tuple(rng.integers(0, vocab, 3).tolist()) if at % 2 else (),
        )
        for at in range(count)
    ]


def alone(model, policy, asked):
    """The tokens of a request by itself."""
    session = jaxkv.Session(model, policy, key=asked.seed)
    cache = session.prefill(asked.prompt, new=NEW)
    loop = session.start_decode_loop(
        cache, new=NEW, sampling=asked.sampling, eos=asked.eos, prompts=[asked.prompt]
    )
    parts, left = [], asked.new
    while left and not loop.ended_sequences.all():
        parts.append(loop.sample_tokens(left))
        left -= parts[-1].shape[1]
    tokens = np.concatenate(parts, axis=1)[0]
    return tokens[tokens >= 0].tolist()


def made(model, policy, **options):
    """Slots for such requests."""
    limits = {"count": SLOTS, "max_prompt": PROMPT, "max_new_tokens": NEW, "size": 64}
    return Slots(jaxkv.Session(model, policy, key=0), **limits | options)


def begun(slots, asked):
    """A request's sequence, prefilled."""
    cache = slots.prefill(asked.prompt, key=asked.seed)
    return slots.begin_sequence(
        cache,
        max_new_tokens=asked.new,
        sampling=asked.sampling,
        eos=asked.eos,
        key=asked.seed,
        prompt=asked.prompt,
    )


def answered(slots, given, *, steps=8):
    """The tokens of each request, and how many programs were compiled meanwhile: free slots are filled in order."""
    waiting, active, out, clock = list(range(len(given))), {}, [[] for _ in given], StageClock()
    with clock:
        while waiting or active:
            for slot in [slot for slot in range(slots.count) if slot not in active][: len(waiting)]:
                active[slot] = waiting.pop(0)
                slots.insert_sequence(begun(slots, given[active[slot]]), slot)
            tokens = slots.decode(steps, until="any" if waiting else "all")
            for slot in list(active):
                out[active[slot]] += tokens[slot][tokens[slot] >= 0].tolist()
                if slots.done[slot]:
                    del active[slot]
    return out, clock.programs


def check(model, policy, given, *, slots=None, reference=None):
    """Over slots every request gets the tokens that it gets alone by `Session`, and nothing is compiled."""
    slots = made(model, policy) if slots is None else slots
    out, programs = answered(slots, given)
    assert programs == 0
    whole = model if reference is None else reference
    for asked, tokens in zip(given, out, strict=True):
        assert tokens == alone(whole, policy, asked), asked
