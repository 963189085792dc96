"""Log-probabilities of prompts: those of decoding token by token without compression, in `generate` and the server."""

import functools

import jax
import lettered
import meshes
import numpy as np
import pytest
import tiny
from lettered import DOC
from starlette.testclient import TestClient

import jaxkv
from jaxkv.engine.progress import run_generator
from jaxkv.engine.prompt_scores import PromptScorer
from jaxkv.engine.sampling import Sampling
from jaxkv.serving.http import HttpApplication

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
POLICY = jaxkv.KNorm(budget=16)


@functools.cache
def golden(model, prompt):
    """Log-softmax `[T - 1, V]` in float64 of the logits after each token but the last, decoded over the full cache."""
    session = jaxkv.Session(model, jaxkv.FullKV())
    cache, found = session.prefill([list(prompt[:1])], new=len(prompt)), []
    for token in prompt[1:]:
        logits = np.asarray(cache.logits, np.float64)[0]
        found.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        cache = session.extend(cache, [[token]], chunk=1, donate=True)
    return np.stack(found)


def assert_golden(scores, expected, prompt):
    rows = np.arange(len(prompt) - 1)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(rows), 3)
    np.testing.assert_allclose(scores.token_logprobs, expected[rows, prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-expected)[:, :3], atol=2e-4)
    listed = np.take_along_axis(expected, scores.top_ids, axis=1)
    np.testing.assert_allclose(listed, scores.top_logprobs, atol=2e-4)


@pytest.mark.parametrize(
    "policy",
    [
        jaxkv.FullKV(),
        jaxkv.SnapKV(budget=8, window=4),
        jaxkv.H2O(budget=12),
        jaxkv.KVzip(budget=0.5),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_batch_is_scored_before_its_compression(policy):
    """Prompts of one chunk and of several, and of a single token; the answers are those without scores."""
    model, prompts = tiny.tiny(tiny.MODELS["gqa3"]), tiny.prompts(3, [40, 1, 150])
    greedy = {"max_new_tokens": 5, "stop_at_eos": False, "policy": policy}
    if isinstance(policy, jaxkv.KVzip):
        # Its second pass reads texts; this model has 128 positions.
        model, prompts[2] = lettered.tiny(), prompts[2][:90]
    plain = jaxkv.generate(model, prompts, **greedy)
    asked = Sampling(temperature=0, prompt_logprobs=3)
    scored = jaxkv.generate(model, prompts, sampling=asked, **greedy)
    assert [each.tokens.tolist() for each in scored] == [each.tokens.tolist() for each in plain]
    assert plain[0].prompt_logprobs is None and scored[1].prompt_logprobs is None
    for at in (0, 2):
        assert scored[at].logprobs is None
        assert_golden(scored[at].prompt_logprobs, golden(model, tuple(prompts[at])), prompts[at])
    alone = jaxkv.generate(model, prompts[0], sampling=asked, **greedy)
    np.testing.assert_allclose(
        alone.prompt_logprobs.token_logprobs, scored[0].prompt_logprobs.token_logprobs, atol=1e-4
    )


def test_a_mesh_scores_as_one_device():
    model, prompts = tiny.tiny(tiny.MODELS["gqa4"]), tiny.prompts(4, [20, 33, 9])
    options = {"max_new_tokens": 2, "sampling": Sampling(temperature=0, prompt_logprobs=2)}
    one = jaxkv.generate(model, prompts, **options)
    many = jaxkv.generate(model, prompts, mesh=meshes.mesh_of(2, 2), **options)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a.prompt_logprobs.top_ids, b.prompt_logprobs.top_ids)
        for name in ("token_logprobs", "top_logprobs"):
            mine, theirs = (getattr(each.prompt_logprobs, name) for each in (a, b))
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_what_cannot_be_scored_is_rejected():
    model, asked = lettered.tiny(), Sampling(temperature=0, prompt_logprobs=0)
    cache = jaxkv.prefill(model, DOC)
    with pytest.raises(ValueError, match="prompt_logprobs=0: not supported for a question"):
        jaxkv.generate(model, "who?", cache=cache, sampling=asked)
    chunked = jaxkv.OmniKV(filter_layers=(0,), prefill_ratio=0.5, prefill_chunk=16)
    with pytest.raises(ValueError, match="prompt_logprobs=0: not supported by chunked prefill"):
        jaxkv.generate(tiny.tiny(tiny.MODELS["gqa3"]), [[3] * 40], policy=chunked, sampling=asked)
    session = jaxkv.Session(model)
    with pytest.raises(ValueError, match="sampling="):
        session.sample(session.prefill([[3, 4]], new=2), 2, sampling=asked)
    with pytest.raises(ValueError, match="prompt_logprobs=21"):
        Sampling(prompt_logprobs=21)


# --- over the server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    options = {"slots": 2, "max_prompt_tokens": 64, "max_question_tokens": 16, "queue": 12}
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, max_new_tokens=40, **options) as engine:
        yield engine


@pytest.fixture
def client(engine):
    return TestClient(HttpApplication({"tiny": engine}))


def alone(prompt, **options):
    sampling = Sampling(temperature=0, logprobs=2, prompt_logprobs=2)
    options = {"max_new_tokens": 9, "stop_at_eos": False, "policy": POLICY, **options}
    return jaxkv.generate(lettered.tiny(), prompt, sampling=sampling, **options)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_an_echo_has_the_prompts_log_probabilities(client, tokens):
    text, prompts = lettered.tiny().text, lettered.ids(5, 3, 30, 41)
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": tokens, **GREEDY}
    found = client.post(TEXTS, json=body).json()
    counts = {"prompt_tokens": 74, "completion_tokens": 3 * tokens}
    assert {name: found["usage"][name] for name in counts} == counts
    for prompt, choice in zip(prompts, found["choices"], strict=True):
        answer, scores = alone([prompt])[0], choice["logprobs"]
        spelled = [text.spell_token(each) for each in [*prompt, *answer.tokens[:tokens].tolist()]]
        assert choice["text"].startswith(text.decode(prompt)) and scores["tokens"] == spelled
        assert choice["finish_reason"] == "length" and "prompt_logprobs" not in choice
        first, *values = scores["token_logprobs"]
        both = answer.prompt_logprobs.token_logprobs, answer.logprobs.token_logprobs[:tokens]
        assert first is None and values == pytest.approx(np.concatenate(both), abs=1e-4)
        offsets = [sum(map(len, spelled[:at])) for at in range(len(spelled))]
        assert scores["text_offset"] == offsets
        for token, value, top in zip(spelled[1:], values, scores["top_logprobs"][1:], strict=True):
            assert top[token] == value and len(top) in (2, 3)
    (plain,) = client.post(TEXTS, json={**body, "prompt": DOC, "logprobs": None}).json()["choices"]
    answer = alone(DOC, raw=True)
    assert plain["text"] == DOC + text.decode(answer.tokens[:tokens]) and plain["logprobs"] is None


def test_several_answers_echo_one_prompt(client):
    body = {"prompt": DOC, "echo": True, "logprobs": 1, "max_tokens": 4, "n": 3, "seed": 7}
    choices = client.post(TEXTS, json={**body, "ignore_eos": True}).json()["choices"]
    length = len(DOC) + 1
    heads = [each["logprobs"]["token_logprobs"][:length] for each in choices]
    assert heads[0] == heads[1] == heads[2] and heads[0][0] is None
    assert len({each["text"] for each in choices}) > 1
    assert all(each["text"].startswith(DOC) for each in choices)
    (none,) = client.post(TEXTS, json={**body, "n": 1, "max_tokens": 0}).json()["choices"]
    assert none["text"] == DOC and none["logprobs"]["token_logprobs"] == heads[0]


def test_prompt_logprobs_have_vllms_form(client):
    text = lettered.tiny().text
    prompt, chat = lettered.ids(6, 12)[0], [{"role": "user", "content": DOC[:19]}]
    body = {"prompt": [prompt, prompt[:5]], "prompt_logprobs": 2, "max_tokens": 3, **GREEDY}
    found = client.post(TEXTS, json=body).json()["choices"]
    whole = alone([prompt, prompt[:5]], max_new_tokens=3)
    listed = [
        (each["prompt_logprobs"], of, ids)
        for each, of, ids in zip(found, whole, body["prompt"], strict=True)
    ]
    asked = {"messages": chat, "prompt_logprobs": 2, "max_tokens": 3, **GREEDY}
    reply = client.post(CHATS, json=asked).json()
    ids = text.encode(text.render_chat(chat, generation_prompt=True), bos=False)
    listed.append((reply["prompt_logprobs"], alone(chat)[0], ids))
    for values, answer, ids in listed:
        first, *rest = values
        scores = answer.prompt_logprobs
        assert first is None and len(rest) == len(ids) - 1 == len(scores.token_logprobs)
        for at, each in enumerate(rest):
            own = each[str(ids[at + 1])]
            assert own["logprob"] == pytest.approx(scores.token_logprobs[at], abs=1e-4)
            assert own["decoded_token"] == text.spell_token(ids[at + 1])
            ranks = {int(token): value["rank"] for token, value in each.items()}
            likeliest = {token: rank for rank, token in enumerate(scores.top_ids[at].tolist(), 1)}
            assert ranks == {ids[at + 1]: None, **likeliest}
    assert found[0]["text"] == whole[0].text and found[0]["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXTS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXTS, {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        (TEXTS, {"prompt": "a", "echo": True, "stream": True}, "stream"),
        (TEXTS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "stream"),
        (TEXTS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo"),
        ("/v1/responses", {"input": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_errors_name_the_field(client, path, body, param):
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_question_on_a_document_is_not_scored(client, engine):
    made = engine.document(DOC)
    for more in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}):
        response = client.post(TEXTS, json={"prompt": "who?", "document": made.id, **more})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "prompt_logprobs"


def test_a_scored_prompt_is_read_whole():
    """Although a stored conversation begins like it; nothing is left of a request that is cancelled."""
    options = {"slots": 1, "max_prompt_tokens": 80, "max_question_tokens": 32, "max_new_tokens": 8}
    with jaxkv.Engine(lettered.tiny(), policy=jaxkv.FullKV(), **options) as engine:
        client = TestClient(HttpApplication({"tiny": engine}))
        body = {"prompt": DOC, "max_tokens": 8, **GREEDY}
        following = DOC + client.post(TEXTS, json=body).json()["choices"][0]["text"] + " and"
        scored = {"prompt": following, "echo": True, "logprobs": 1, "max_tokens": 1, **GREEDY}
        found = client.post(TEXTS, json=scored).json()
        assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert len(found["choices"][0]["logprobs"]["tokens"]) == len(following) + 2
        asked = Sampling(temperature=0, prompt_logprobs=0)
        for _ in range(3):
            engine.submit(following, max_new_tokens=0, sampling=asked, raw=True).cancel()
        done = engine.submit(following, max_new_tokens=0, sampling=asked, raw=True).result()
        assert len(done.tokens) == 0 and done.finish_reason == "length" and done.text == ""
        values = found["choices"][0]["logprobs"]["token_logprobs"]
        assert done.prompt_logprobs.token_logprobs == pytest.approx(values[1:-1], abs=1e-4)
        with pytest.raises(ValueError, match="max_new_tokens=0"):
            engine.submit(following, max_new_tokens=0)
        assert engine.stats.running == engine.stats.waiting == 0


def test_scores_are_complete_while_the_prompt_is_read_again():
    """As for a further answer under a policy with random numbers; the first one may end meanwhile."""
    session = jaxkv.Session(tiny.tiny(tiny.MODELS["gqa3"]), POLICY)
    scorer, prompts = PromptScorer(top=2), tiny.prompts(3, [40, 150])
    run_generator(session.iterate_prefill(prompts, scorer=scorer))
    scored = scorer.scored
    assert [len(each) for each in scored] == [40, 150]
    for _ in session.iterate_prefill(prompts, scorer=scorer):
        assert scorer.scored == scored
    assert scorer.scored == scored and scorer.scored is not scored


def test_scoring_compiles_only_when_asked():
    """The programs of prompts without scores are the same as before one with scores."""
    model, prompt = tiny.tiny(tiny.MODELS["mha"]), tiny.prompts(8, [30])[0]
    options = {"max_new_tokens": 3, "stop_at_eos": False}
    jaxkv.generate(model, prompt, **options)
    jax.block_until_ready(jaxkv.generate(model, prompt, **options).cache.pools)
    first = jaxkv.generate(
        model, prompt, sampling=Sampling(temperature=0, prompt_logprobs=1), **options
    )
    again = jaxkv.generate(
        model, prompt, sampling=Sampling(temperature=0, prompt_logprobs=20), **options
    )
    assert first.stats.compiled_programs > 0 == again.stats.compiled_programs
    assert jaxkv.generate(model, prompt, **options).stats.compiled_programs == 0
