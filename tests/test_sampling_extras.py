"""Penalties, biases and log-probabilities: against plain loops, transformers' processors, and the model's logits."""

import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import lettered
import meshes
import numpy as np
import omnikv_cases
import pytest
import slot_runs as runs
import tiny

import jaxkv
from jaxkv import Sampling
from jaxkv.engine import grouped_decode, spec
from jaxkv.engine.progress import run_generator
from jaxkv.engine.sampling import combine_samplers
from jaxkv.engine.sampling_extras import create_extras
from jaxkv.engine.slot_shape import EXTRAS
from jaxkv.machine.compilation import StageClock

GOLDEN = Path(__file__).parent / "golden" / "processors.npz"
NEW, TOP = 12, 4
STRONG = Sampling(
    temperature=0,
    repetition_penalty=1.7,
    presence_penalty=0.6,
    frequency_penalty=0.9,
    logit_bias={3: -100, 7: 2.5},
    logprobs=TOP,
)
# In slots, beside those without extras.
MIXED = (
    STRONG,
    Sampling(temperature=0),
    Sampling(temperature=0.8, frequency_penalty=2.0, top_p=0.9),
    Sampling(temperature=1.1),
    Sampling(logprobs=0, min_p=0.05),
    Sampling(temperature=0, logit_bias=((5, 3.0),), stop_token_ids=(1, 2, 4)),
)


def model():
    return tiny.tiny(tiny.TWO_LAYERS)


def processed(logits, sampling, prompt, answer):
    """Logits `[V]` in float64 after biases and penalties, token by token."""
    out = np.asarray(logits, np.float64).copy()
    for token, bias in sampling.logit_bias:
        out[token] += bias
    for token in {*prompt, *answer}:
        ratio = sampling.repetition_penalty
        out[token] = out[token] / ratio if out[token] > 0 else out[token] * ratio
    for token in set(answer):
        times = list(answer).count(token)
        out[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    return out


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def random_samplings(rng, count, vocab):
    """Settings of all kinds, sampled at random."""
    return [
        Sampling(
            temperature=float(rng.uniform(0, 2)) * (at % 3 > 0),
            top_k=int(rng.integers(0, 9)),
            top_p=float(rng.uniform(0.5, 1)),
            min_p=float(rng.uniform(0, 0.2)),
            repetition_penalty=float(rng.uniform(0.5, 2)),
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            logit_bias={int(each): float(rng.normal()) for each in rng.integers(0, vocab, at % 4)},
            stop_token_ids=tuple(rng.integers(0, vocab, at % 3).tolist()),
            logprobs=None if at % 2 else int(rng.integers(0, 21)),
        )
        for at in range(count)
    ]


def extras_after(samplings, prompts, answers, vocab):
    """Extras of a batch, a setting for each sequence, after the answers' tokens `[B, n]`; -1 for no token."""
    each = [
        create_extras(sampling, [prompt], batch=1, vocab=vocab, axes=None, always=True)
        for sampling, prompt in zip(samplings, prompts, strict=True)
    ]
    extras = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)
    for column in np.asarray(answers).T:
        token, logits = jnp.asarray(column), jnp.zeros((len(column), vocab))
        extras, _ = extras.count_and_score(token, token >= 0, logits)
    return extras


def test_logits_are_processed_as_in_plain_loops():
    rng, vocab = np.random.default_rng(2), 45
    samplings = random_samplings(rng, 32, vocab)
    logits = rng.normal(scale=3, size=(32, vocab)).astype(np.float32)
    prompts = [rng.integers(0, vocab, rng.integers(1, 30)).tolist() for _ in samplings]
    answers = np.where(rng.random((32, 9)) < 0.8, rng.integers(0, 12, (32, 9)), -1).astype(np.int32)
    extras = extras_after(samplings, prompts, answers, vocab)
    allowed = rng.random((32, vocab)) < 0.9
    bits = np.zeros((32, 64), np.uint8)
    bits[:, :vocab] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    extras = dataclasses.replace(extras, allowed=jnp.asarray(words))
    found = np.asarray(extras.process_logits(jnp.asarray(logits)))
    for row, sampling in enumerate(samplings):
        answer = [token for token in answers[row].tolist() if token >= 0]
        expected = np.where(
            allowed[row], processed(logits[row], sampling, prompts[row], answer), -np.inf
        )
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


def test_logits_are_processed_as_by_transformers():
    given = np.load(GOLDEN)
    names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    samplings = [
        Sampling(
            **{name: given[name][at].item() for name in names},
            logit_bias=dict(
                zip(given["biased"][at].tolist(), given["biases"][at].tolist(), strict=True)
            ),
        )
        for at in range(len(given["logits"]))
    ]
    vocab = given["logits"].shape[1]
    extras = extras_after(samplings, given["prompts"].tolist(), given["answers"], vocab)
    found = extras.process_logits(jnp.asarray(given["logits"]))
    np.testing.assert_allclose(found, given["processed"], rtol=1e-5, atol=1e-6)
    masks = np.isfinite(np.asarray(combine_samplers(samplings).mask_logits(found)))
    np.testing.assert_array_equal(masks, given["masks"])


def stepwise(model, policy, prompt, sampling, new=NEW, cache=None):
    """A greedy answer by the public API, token by token: ids, and log-probabilities `[n, V]` of the model."""
    session = jaxkv.Session(model, policy)
    cache = session.prefill(prompt, new=new) if cache is None else session.extend(cache, prompt)
    tokens, scores = [], []
    while len(tokens) < new and (not tokens or tokens[-1] not in sampling.stop_token_ids):
        if tokens:
            cache = session.extend(cache, [tokens[-1:]], chunk=1)
        logits = np.asarray(cache.logits)[0]
        scores.append(log_softmax(logits))
        tokens.append(int(processed(logits, sampling, prompt, tokens).argmax()))
    return tokens, np.stack(scores)


def assert_answer(found, tokens, scores, top=TOP):
    """A completion has these tokens, and the log-probabilities of `[n, V]`."""
    assert found.tokens.tolist() == tokens
    told, rows = found.logprobs, np.arange(len(tokens))
    np.testing.assert_allclose(told.token_logprobs, scores[rows, tokens], atol=2e-4)
    np.testing.assert_allclose(told.top_logprobs, -np.sort(-scores)[:, :top], atol=2e-4)
    assert told.top_ids.shape == told.top_logprobs.shape == (len(tokens), top)
    np.testing.assert_allclose(scores[rows[:, None], told.top_ids], told.top_logprobs, atol=2e-4)


@pytest.mark.parametrize(
    "policy", [jaxkv.FullKV(), jaxkv.SnapKV(budget=20, window=8), jaxkv.StreamingLLM(budget=16)]
)
def test_answers_are_those_of_plain_loops(policy):
    """A batch of unequal lengths, some of which end at an id of their own."""
    prompts = tiny.prompts(3, (46, 17, 30))
    plain = [stepwise(model(), policy, prompt, STRONG) for prompt in prompts]
    # One that the second answer comes to.
    sampling = dataclasses.replace(STRONG, stop_token_ids=(plain[1][0][5],))
    options = {"policy": policy, "sampling": sampling, "max_new_tokens": NEW}
    out = jaxkv.generate(model(), prompts, **options)
    for prompt, found in zip(prompts, out, strict=True):
        tokens, scores = stepwise(model(), policy, prompt, sampling)
        assert_answer(found, tokens, scores)
        assert found.finish_reason == ("stop" if len(tokens) < NEW else "length")
    assert len(out[1].tokens) < NEW
    stream = jaxkv.generate(model(), prompts, stream=True, **options)
    for _ in stream:
        pass
    for one, other in zip(stream.result, out, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(
            one.logprobs.top_logprobs, other.logprobs.top_logprobs, atol=1e-5
        )


def test_tokens_before_a_cache_are_not_penalised():
    policy, document, question = jaxkv.KNorm(budget=24), *tiny.prompts(4, (40, 7))
    cache = jaxkv.prefill(model(), document, policy=policy)
    found = jaxkv.generate(model(), question, cache=cache, sampling=STRONG, max_new_tokens=NEW)
    assert_answer(found[0], *stepwise(model(), policy, question, STRONG, cache=cache))


def ways(monkeypatch):
    """Models and policies whose tokens come by other programs than the plain loop's, with what they must agree with."""
    whole = meshes.model_of(4)
    yield whole.on(meshes.mesh_of(2, 4)), whole, jaxkv.SnapKV(budget=20, window=8)
    layers = tiny.tiny(omnikv_cases.CONFIG)
    yield layers, layers, omnikv_cases.omni(offload=True)
    monkeypatch.setattr(spec, "_GROUPED_LAYERS", 0)
    monkeypatch.setattr(grouped_decode, "_GROUP_SIZES", (1,))
    yield model(), model(), jaxkv.KNorm(budget=20)
    grouped_decode.split_into_equal_groups.cache_clear()


def test_meshes_offloaded_caches_and_groups_of_layers(monkeypatch):
    """Three prompts on two groups of devices: one is filled up."""
    prompts = meshes.prompts(5, (33, 46, 39))
    for split, whole, policy in ways(monkeypatch):
        options = {"sampling": STRONG, "max_new_tokens": NEW, "policy": policy}
        for prompt, found in zip(prompts, jaxkv.generate(split, prompts, **options), strict=True):
            assert_answer(found, *stepwise(whole, policy, prompt, STRONG))


def test_fifty_settings_are_one_program():
    options = {"max_new_tokens": NEW, "key": 0}
    prompts, given = tiny.prompts(6, (41, 33)), random_samplings(np.random.default_rng(3), 51, 64)
    counts = []
    for sampling in given:
        # A program's end ids are as many as the model's, or as many with ids of one's own.
        ends = sampling.stop_token_ids or (63,)
        sampling = dataclasses.replace(sampling, stop_token_ids=ends)
        out = jaxkv.generate(model(), prompts, sampling=sampling, **options)
        counts.append(out.stats.compiled_programs)
    assert counts[0] and not any(counts[1:])


def test_what_a_session_samples_is_penalised_for_what_it_is_told():
    session, prompt = jaxkv.Session(model()), tiny.prompts(7, (30,))[0]
    sampling = dataclasses.replace(STRONG, logprobs=None)
    cache = session.prefill(prompt, new=NEW)
    unknown = session.sample(cache, NEW, sampling=sampling)[1][0].tolist()
    loop = session.start_decode_loop(cache, new=NEW, sampling=STRONG, prompts=[prompt])
    told = loop.sample_tokens(NEW)[0].tolist()
    assert told == stepwise(model(), None, prompt, sampling)[0] != unknown
    assert loop.logprobs.ids[0, :, 0].tolist() == told


def requests(count, **options):
    """Requests with and without extras, in turns."""
    given = runs.requests(12, count, shortest=33, **options)
    return [
        dataclasses.replace(asked, sampling=MIXED[at % len(MIXED)])
        for at, asked in enumerate(given)
    ]


def compile_extras(slots):
    """Compiles what sequences with extras run, as an engine does: in a thread of the name that is not checked."""
    walk = slots.compile_further_programs(EXTRAS)
    thread = threading.Thread(target=run_generator, args=(walk,), name="jaxkv-compile")
    thread.start()
    thread.join()
    assert EXTRAS not in slots.uncompiled


def test_slots_hold_extras_while_a_sequence_needs_them():
    policy = jaxkv.SnapKV(budget=20, window=8, every=8)
    slots = runs.made(model(), policy, start=False)
    slots.compile_programs(lengths=False)
    before = slots.nbytes
    compile_extras(slots)
    runs.check(model(), policy, requests(12), slots=slots)
    for at, sampling in enumerate((MIXED[1], MIXED[0])):
        asked = dataclasses.replace(requests(1)[0], sampling=sampling, new=3 + 9 * (1 - at), eos=())
        slots.insert_sequence(runs.begun(slots, asked), at)
    slots.decode(1)
    assert slots.nbytes > before
    paused = slots.copy_sequence(1)
    slots.release_slots([1])
    slots.decode(2)
    assert slots.nbytes == before
    check_masks(slots)
    slots.insert_sequence(paused, 2)
    alone = runs.alone(model(), policy, dataclasses.replace(asked, sampling=MIXED[0]))
    assert slots.decode(8)[2][:2].tolist() == alone[1:]
    assert slots.logprobs.ids[2, :2, 0].tolist() == alone[1:]


def test_slots_on_a_mesh_hold_extras():
    whole, policy = meshes.model_of(4), meshes.roomy("snapkv")
    split = whole.on(meshes.mesh_of(2, 4))
    slots = runs.made(split, policy, start=False)
    slots.compile_programs(lengths=False)
    compile_extras(slots)
    runs.check(split, policy, requests(6), slots=slots, reference=whole)
    check_masks(slots)


def check_masks(slots):
    """Two slots sample the only token that their masks allow, a third what it samples without; nothing compiles."""
    given = [dataclasses.replace(each, new=9, eos=()) for each in requests(3)]
    given = [dataclasses.replace(each, sampling=MIXED[1]) for each in given]
    (free,), _ = runs.answered(slots, given[2:])
    clock = StageClock()
    with clock:
        for slot, asked in enumerate(given):
            cache = slots.prefill(asked.prompt, key=asked.seed)
            how = {"max_new_tokens": 9, "sampling": asked.sampling, "key": asked.seed}
            slots.insert_sequence(slots.begin_sequence(cache, extras=slot < 2, **how), slot)
        for at, (one, other) in enumerate(((5, 33), (63, 0), (31, 32))):
            masks = np.full((slots.count, 2), 2**32 - 1, np.uint32)
            for slot, token in enumerate((one, other)):
                masks[slot] = 0
                masks[slot, token // 32] = 1 << token % 32
            slots.extras.set_token_masks(masks)
            assert slots.decode(1)[:3, 0].tolist() == [one, other, free[at]]
    assert clock.programs == 0
    slots.release_slots(range(3))


def test_an_engine_answers_as_generate_whatever_runs_beside():
    """Extras are compiled for the first request with some, beside others that go on."""
    policy = jaxkv.KNorm(budget=20)
    limits = {"slots": 3, "max_prompt_tokens": 64, "max_new_tokens": runs.NEW}
    given = requests(14)
    with jaxkv.Engine(model(), policy=policy, max_question_tokens=16, **limits) as engine:
        document = engine.document(given[0].prompt)
        clock = StageClock()
        with clock:
            asked = [engine.submit(each.prompt, max_new_tokens=each.new) for each in given[:5]]
            [each.result() for each in asked]
        assert clock.programs == 0 and EXTRAS in engine._slots.uncompiled
        asked = [
            engine.submit(
                each.prompt, max_new_tokens=each.new, sampling=each.sampling, key=each.seed
            )
            for each in given
        ]
        question = engine.submit([5, 9, 2], document=document, sampling=STRONG, max_new_tokens=NEW)
        answers = [each.result() for each in (*asked, question)]
    options = [
        {"prompt": each.prompt, "policy": policy, "max_new_tokens": each.new, "key": each.seed}
        | {"sampling": each.sampling}
        for each in given
    ]
    cache = jaxkv.prefill(model(), given[0].prompt, policy=policy)
    options.append({"prompt": [5, 9, 2], "cache": cache, "sampling": STRONG, "max_new_tokens": NEW})
    for answer, each in zip(answers, options, strict=True):
        alone = jaxkv.generate(model(), **each)[0]
        assert answer.tokens.tolist() == alone.tokens.tolist()
        assert answer.finish_reason == alone.finish_reason
        assert (answer.logprobs is None) == (alone.logprobs is None)
        if answer.logprobs is not None:
            for one, other in zip(
                vars(answer.logprobs).values(), vars(alone.logprobs).values(), strict=True
            ):
                np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_stop_string_ends_log_probabilities():
    options = {
        "max_new_tokens": NEW,
        "stop_at_eos": False,
        "sampling": Sampling(temperature=0, logprobs=2),
    }
    whole = jaxkv.generate(lettered.tiny(), lettered.DOC, **options)
    found = jaxkv.generate(lettered.tiny(), lettered.DOC, stop=whole.text[3], **options)
    assert len(found.logprobs.token_logprobs) == len(found.tokens) < NEW
    count = len(found.tokens)
    np.testing.assert_array_equal(
        found.logprobs.token_logprobs, whole.logprobs.token_logprobs[:count]
    )


def test_settings_of_any_kind(as_users_call):
    one = Sampling(logit_bias={np.int64(7): np.float32(2.5), 3: -1}, stop_token_ids=[9, 2, 9])
    assert one.logit_bias == ((3, -1.0), (7, 2.5)) and one.stop_token_ids == (2, 9)
    assert hash(one) == hash(Sampling(logit_bias=[(7, 2.5), (3, -1)], stop_token_ids=(9, 2)))
    assert dataclasses.replace(one, top_k=3).logit_bias == one.logit_bias
    assert jaxkv.generate(model(), [1, 2], max_new_tokens=2).logprobs is None


def test_what_cannot_be(as_users_call, tmp_path):
    prompt = [1, 2, 3]
    session = jaxkv.Session(model())
    for call, named in (
        (
            lambda: jaxkv.generate(
                model(), prompt, sampling=Sampling(temperature=0, logit_bias={64: 1})
            ),
            "logit_bias=",
        ),
        (
            lambda: jaxkv.generate(
                model(), prompt, sampling=Sampling(temperature=0, stop_token_ids=64)
            ),
            "stop_token_ids=",
        ),
        (
            lambda: session.sample(session.prefill(prompt), 2, sampling=STRONG),
            "no log-probabilities",
        ),
        (
            lambda: jaxkv.export(
                model(), tmp_path / "x", lengths=64, sampling=Sampling(logit_bias={3: 1})
            ),
            "cannot be exported",
        ),
        (
            lambda: jaxkv.export(
                model(), tmp_path / "x", lengths=64, sampling=Sampling(stop_token_ids=3)
            ),
            "cannot be exported",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            call()
