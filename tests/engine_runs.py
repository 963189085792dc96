"""Random requests to an `Engine` of 8 slots: each as alone.

Prompts, numbers of tokens, samplers, cancellations and questions on documents are sampled at random.
"""

import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest
import slot_runs as runs
import tiny

import jaxkv
from jaxkv.machine.compilation import StageClock

SLOTS, QUESTION = 8, 8
LIMITS = {
    "slots": SLOTS,
    "max_prompt_tokens": runs.PROMPT,
    "max_new_tokens": runs.NEW,
    "max_question_tokens": QUESTION,
    "queue": 400,
    "prefill_tokens": 4 * 64,
    "document_bytes": 10**9,
}


def checked(policy, count):
    """Asks all requests at once; returns how many answers there were, and how many programs were compiled meanwhile.

    Raises AssertionError where tokens are not those of the request alone.
    """
    model, rng = tiny.tiny(tiny.TWO_LAYERS), np.random.default_rng(8)
    # Prompts of one bucket: what each answers alone is compiled for its length.
    drawn = runs.requests(11, count, sampled=True, shortest=33)
    given = [dataclasses.replace(asked, eos=()) for asked in drawn]
    options = [
        {"max_new_tokens": each.new, "sampling": each.sampling, "key": each.seed} for each in given
    ]
    texts = [rng.permutation(64)[:50].tolist() for _ in range(3)]
    with jaxkv.Engine(model, policy=policy, **LIMITS) as engine:
        documents = [engine.document(text) for text in texts]
        clock = StageClock()
        with clock:
            requests, expected = [], []
            for at, (asked, each) in enumerate(zip(given, options, strict=True)):
                on = at % 3 if at % 5 == 0 else None
                prompt = asked.prompt if on is None else asked.prompt[:QUESTION]
                document = None if on is None else documents[on]
                requests.append(engine.submit(prompt, document=document, **each))
                expected.append((asked, prompt, on, each))
                if at % 7 == 3:
                    requests[at - 2].cancel()
            answers = [
                None if request.cancelled else request.result().tokens.tolist()
                for request in requests
            ]
        stats = engine.stats
        assert stats.waiting == stats.ready == stats.running == 0
    caches = [jaxkv.prefill(model, text, policy=policy) for text in texts]
    told = 0
    for answer, (asked, prompt, on, each) in zip(answers, expected, strict=True):
        if answer is not None:
            alone = (
                runs.alone(model, policy, asked)
                if on is None
                else jaxkv.generate(model, prompt, cache=caches[on], **each).tokens.tolist()
            )
            assert answer == alone, (prompt, on, each)
            told += 1
    return told, clock.programs


@contextlib.contextmanager
def held(engine):
    """Every prefill goes on until the block ends; yields an event that is set once one was given up in mid-prefill."""
    over, given_up, prefilling = threading.Event(), threading.Event(), engine._slots.iterate_prefill

    def slow(*args, **options):
        try:
            while not over.is_set():
                time.sleep(0.001)
                yield 0.0
        except GeneratorExit:
            given_up.set()
            raise
        return (yield from prefilling(*args, **options))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine._slots, "iterate_prefill", slow)
        try:
            yield given_up
        finally:
            over.set()


def under_way(engine, waiting):
    """Waits until a prompt is being prefilled and as many others wait."""
    while (engine.stats.prefilling, engine.stats.waiting) != (1, waiting):
        time.sleep(0.001)
