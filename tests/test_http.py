"""OpenAI's HTTP interface to an engine: answers as `generate`'s, rejections in OpenAI's form, clients that go away."""

import asyncio
import json
import logging
import re
import signal

import jax
import lettered
import openai
import pytest
from engine_runs import held
from lettered import DOC, ids
from starlette.testclient import TestClient

import jaxkv
from jaxkv.engine.sampling import Sampling
from jaxkv.serving.http import HttpApplication
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.server import Server

POLICY = jaxkv.KNorm(budget=16)
CHAT = [{"role": "user", "content": DOC}]
TEXTS, CHATS, DOCUMENTS = "/v1/completions", "/v1/chat/completions", "/v1/documents"
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    options = {"slots": 2, "max_prompt_tokens": 64, "max_question_tokens": 16, "queue": 6}
    options["max_new_tokens"] = 40
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine):
    return HttpApplication({"tiny": engine}, limits=RequestLimits(body_bytes=4000, answers=6))


@pytest.fixture
def client(app):
    return TestClient(app)


def alone(prompt, **options):
    """The answer of `generate` with this engine's policy."""
    options = {"max_new_tokens": 9, "stop_at_eos": False, **options}
    return jaxkv.generate(lettered.tiny(), prompt, policy=POLICY, **options)


def events(response):
    """Objects of a stream, which must have ended in order."""
    assert response.status_code == 200 and response.headers["content-type"].startswith(
        "text/event-stream"
    )
    *found, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(each) for each in found]


def test_texts_and_ids_are_continued_as_generate_does(client):
    prompts = ids(3, 9, 14)
    found = client.post(TEXTS, json={"model": "tiny", "prompt": prompts, **GREEDY}).json()
    assert found["object"] == "text_completion"
    for at, (choice, text) in enumerate(
        zip(found["choices"], (each.text for each in alone(prompts)), strict=True)
    ):
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (at, text, "length")
    counts = {"prompt_tokens": 23, "completion_tokens": 18, "total_tokens": 41}
    assert found["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    body = {"prompt": DOC, "temperature": 0, "ignore_eos": True}
    (choice,) = client.post(TEXTS, json=body).json()["choices"]
    # OpenAI's default is 16 tokens.
    assert choice["text"] == alone(DOC, raw=True, max_new_tokens=16).text


def test_chats_are_answered_as_generate_does(client):
    def answered(messages, **more):
        found = client.post(CHATS, json={"messages": messages, **GREEDY, **more}).json()
        assert found["object"] == "chat.completion"
        assert (
            found["choices"][0]["message"].items() >= {"role": "assistant", "refusal": None}.items()
        )
        return found["choices"][0]["message"]["content"], found["choices"][0]["finish_reason"]

    text = alone(CHAT).text
    halves = [{"type": "text", "text": each} for each in (DOC[:9], DOC[9:])]
    assert answered(CHAT) == answered([{"role": "user", "content": halves}]) == (text, "length")
    options = {"policy": jaxkv.KNorm(budget=9), "max_new_tokens": 9, "stop_at_eos": False}
    smaller = jaxkv.generate(lettered.tiny(), CHAT, **options)
    assert answered(CHAT, budget=9)[0] == smaller.text
    stopped = text[: text.index(text[4])]
    assert answered(CHAT, stop=[text[4], "zzz"]) == (stopped, "stop")


@pytest.mark.parametrize("seed", [7, 2**40 + 7])
def test_draws_follow_the_seed(client, seed):
    """One answer samples with the seed's key, several with keys folded from it."""
    key = jax.random.key(seed) if seed < 2**32 else jax.random.fold_in(jax.random.key(7), 2**8)
    body = {
        "messages": CHAT,
        "seed": seed,
        "max_completion_tokens": 9,
        "ignore_eos": True,
        "top_p": 0.9,
    }
    (one,) = client.post(CHATS, json=body).json()["choices"]
    assert one["message"]["content"] == alone(CHAT, sampling=Sampling(top_p=0.9), key=key).text
    if seed == 7:
        found = client.post(CHATS, json={**body, "top_p": None, "n": 3}).json()
        keys = [jax.random.fold_in(key, at) for at in range(3)]
        texts = [alone(CHAT, sampling=Sampling(temperature=1.0), key=each).text for each in keys]
        assert [each["message"]["content"] for each in found["choices"]] == texts
        assert found["usage"]["completion_tokens"] == 27 and found["usage"]["prompt_tokens"] == 47


@pytest.mark.parametrize(
    ("path", "asked"), [(TEXTS, {"prompt": ids(3, 9, 14)}), (CHATS, {"messages": CHAT, "n": 2})]
)
def test_streams_are_the_same_in_pieces(client, path, asked):
    body = {**asked, **GREEDY}
    whole = client.post(path, json=body).json()
    found = events(
        client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    *chunks, last = found
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({each["id"] for each in found}) == 1 and all(
        each["usage"] is None for each in chunks
    )
    for at, choice in enumerate(whole["choices"]):
        mine = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == at]
        if path == CHATS:
            said = [each["delta"].get("content", "") for each in mine]
            assert "".join(said) == choice["message"]["content"]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert mine[-1]["delta"] == {}
        else:
            assert "".join(each["text"] for each in mine) == choice["text"]
        reasons = [each["finish_reason"] for each in mine]
        assert len(mine) > 2 and reasons == [None] * (len(mine) - 1) + ["length"]
    plain = events(client.post(path, json={**body, "stream": True}))
    assert not any("usage" in each for each in plain)


SCORED = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.4,
    "logit_bias": {"7": 2.5, "9": -100},
}


def scored_alone(prompt, top):
    """An answer of `generate` with these settings, and the tokens' characters."""
    bias = {int(token): number for token, number in SCORED["logit_bias"].items()}
    sampling = Sampling(**{**SCORED, "logit_bias": bias}, temperature=0, logprobs=top)
    answer = alone(prompt, sampling=sampling)[0]
    return answer, [
        lettered.tiny().text.decode([each], skip_special=False) for each in answer.tokens
    ]


def approximately(answer):
    """An answer's objects, whose numbers may differ by rounding: prompts are read together or not."""
    near = lambda text: pytest.approx(float(text), abs=1e-4)  # noqa: E731
    return json.loads(json.dumps(answer), parse_float=near)


def test_log_probabilities_of_texts_have_openais_form(client):
    prompts = ids(3, 9, 14)
    body = {"prompt": prompts, **GREEDY, **SCORED, "logprobs": 3}
    whole = [each["logprobs"] for each in client.post(TEXTS, json=body).json()["choices"]]
    pieces = [{name: [] for name in whole[0]} for _ in prompts]
    for event in events(client.post(TEXTS, json={**body, "stream": True})):
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                pieces[choice["index"]][name] += values
    assert pieces == approximately(whole)
    for prompt, found in zip(prompts, whole, strict=True):
        answer, letters = scored_alone(prompt, 3)
        assert found["tokens"] == letters
        assert found["text_offset"] == [sum(map(len, letters[:at])) for at in range(len(letters))]
        assert found["token_logprobs"] == pytest.approx(answer.logprobs.token_logprobs, abs=1e-4)
        for at, top in enumerate(found["top_logprobs"]):
            likeliest = map(lettered.tiny().text.spell_token, answer.logprobs.top_ids[at])
            assert top.keys() == {letters[at], *likeliest}
            assert top[letters[at]] == found["token_logprobs"][at]


def test_log_probabilities_of_chats_have_openais_form(client):
    body = {"messages": CHAT, **GREEDY, **SCORED, "logprobs": True, "top_logprobs": 2}
    (choice,) = client.post(CHATS, json=body).json()["choices"]
    streamed = [
        each
        for event in events(client.post(CHATS, json={**body, "stream": True}))
        for choice in event["choices"]
        for each in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == choice["logprobs"]["content"]
    answer, letters = scored_alone(CHAT, 2)
    for at, (found, letter) in enumerate(zip(streamed, letters, strict=True)):
        assert (found["token"], found["bytes"]) == (letter, list(letter.encode()))
        assert found["logprob"] == pytest.approx(answer.logprobs.token_logprobs[at], abs=1e-4)
        numbers = [each["logprob"] for each in found["top_logprobs"]]
        assert numbers == pytest.approx(answer.logprobs.top_logprobs[at], abs=1e-4)
    (plain,) = client.post(CHATS, json={**body, "top_logprobs": 0}).json()["choices"]
    assert [each["top_logprobs"] for each in plain["logprobs"]["content"]] == [[]] * len(letters)


def test_ids_end_an_answer(client):
    end = alone(CHAT).tokens[4].item()
    body = {"messages": CHAT, **GREEDY, "stop_token_ids": [end]}
    found = client.post(CHATS, json=body).json()
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["logprobs"] is None
    assert found["usage"]["completion_tokens"] <= 5


def test_the_role_of_a_streamed_answer_comes_with_its_first_text(engine, app):
    """The headers come at once; clients take the first event for the first token."""
    body, sent = {"messages": CHAT, **GREEDY, "n": 2, "stream": True}, []

    async def main():
        with held(engine):
            answering = asyncio.create_task(
                posted(app, CHATS, body, until=lambda: False, sent=sent)
            )
            while not (sent and engine.stats.prefilling):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            early = list(sent)
        await answering
        return early

    (start,) = asyncio.run(asyncio.wait_for(main(), 60))
    assert start["type"] == "http.response.start" and start["status"] == 200
    first = {}
    for message in sent[1:-2]:
        chunks = [
            json.loads(each.removeprefix(b"data: "))
            for each in message["body"].split(b"\n\n")
            if each
        ]
        (at,) = {chunk["choices"][0]["index"] for chunk in chunks}
        first.setdefault(at, [chunk["choices"][0]["delta"] for chunk in chunks])
    assert first.keys() == {0, 1}
    for role, text in first.values():
        assert role == {"role": "assistant", "content": ""} and text["content"]


def test_documents(client):
    made = client.post(DOCUMENTS, json={"text": DOC}).json()
    assert made["object"] == "document" and made["bytes"] > 0
    assert (made["tokens"], made["rows"]) == (45, 16)
    page = f"{DOCUMENTS}/{made['id']}"
    assert made in client.get(DOCUMENTS).json()["data"] and client.get(page).json() == made
    question = [{"role": "user", "content": "who?"}]
    # The document is the beginning of the first user's message.
    talk = [*question, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    asked = {"document": made["id"], **GREEDY}
    cache = jaxkv.prefill(lettered.tiny(), DOC, policy=POLICY)
    options = {"max_new_tokens": 9, "stop_at_eos": False, "cache": cache}
    for prompt, messages in (("who?", question), (talk, talk)):
        text = jaxkv.generate(lettered.tiny(), prompt, **options).text
        found = client.post(CHATS, json={"messages": messages, **asked}).json()
        assert found["choices"][0]["message"]["content"] == text
        assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 45}
        assert found["usage"]["prompt_tokens"] > 49
    found = client.post(TEXTS, json={"prompt": "who?", **asked}).json()["choices"][0]["text"]
    assert found == jaxkv.generate(lettered.tiny(), "who?", **options).text
    system = [{"role": "system", "content": "be brief"}, *question]
    assert rejected(client, CHATS, {"messages": system, **asked})["param"] == "messages"
    gone = {"id": made["id"], "object": "document", "deleted": True}
    assert client.delete(page).json() == gone
    body = {"messages": question, **asked}
    for response in (client.get(page), client.delete(page), client.post(CHATS, json=body)):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "document_not_found"


REFUSED = [
    (TEXTS, {}, "prompt"),
    (TEXTS, {"prompt": ""}, "prompt"),
    (TEXTS, {"prompt": [1, "a"]}, "prompt"),
    (TEXTS, {"prompt": [96]}, "prompt"),
    (TEXTS, {"prompt": "\ud800"}, "prompt"),
    (TEXTS, {"prompt": ["a", "b"], "n": 4}, "n"),
    (TEXTS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXTS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (TEXTS, {"prompt": "a", "stop_token_ids": [96]}, "stop_token_ids"),
    (CHATS, {"messages": []}, "messages"),
    (CHATS, {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    (CHATS, {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHATS, {"tools": [{"type": "function"}]}, "tools"),
    (CHATS, {"frequency_penalty": 2.5}, "frequency_penalty"),
    (CHATS, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHATS, {"logit_bias": {"a": 1}}, "logit_bias"),
    (CHATS, {"logit_bias": {"5": 101}}, "logit_bias"),
    (CHATS, {"logit_bias": {"96": 1}}, "logit_bias"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs"),
    (CHATS, {"temperature": 2.5}, "temperature"),
    (CHATS, {"n": True}, "n"),
    (CHATS, {"stream_options": {"usage": True}}, "stream_options"),
    (CHATS, {"stop": ["a", ""]}, "stop"),
    (CHATS, {"seed": 2**63}, "seed"),
    (CHATS, {"beams": 4}, "beams"),
    (CHATS, {"budget": 17}, "budget"),
    (CHATS, {"\ud800": 4}, None),
    (DOCUMENTS, {}, "text"),
    (DOCUMENTS, {"text": "a", "messages": CHAT}, "text"),
]


def rejected(client, path, body):
    """The error of a body that is rejected with status 400."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == "invalid_request_error"
    return error


def test_what_cannot_be_is_refused_by_name(client):
    for path, body, param in REFUSED:
        given = {"messages": CHAT, **body} if path == CHATS else body
        assert rejected(client, path, given)["param"] == param, body


def test_prompts_that_are_too_long_have_their_own_code(client):
    long = "a" * 65
    chat = [{"role": "user", "content": long}]
    for path, body in (
        (TEXTS, {"prompt": long}),
        (CHATS, {"messages": chat}),
        (DOCUMENTS, {"text": long}),
    ):
        error = rejected(client, path, body)
        assert (error["param"], error["code"]) == (next(iter(body)), "context_length_exceeded")
        assert "64" in error["message"] and re.search("6[5-9]", error["message"])


def test_answers_are_as_long_as_fits(client):
    body = {"prompt": DOC, "temperature": 0, "ignore_eos": True, "max_tokens": 10**9}
    assert client.post(TEXTS, json=body).json()["usage"]["completion_tokens"] == 40


USAGE = {"include_usage": True, "continuous_usage_stats": True}
EMPTY = dict.fromkeys(("seed", "functions", "audio", "document", "model", "stop", "logprobs"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        # Bodies of vLLM's benchmark, of guidellm, and of lm-evaluation-harness.
        (TEXTS, {"prompt": DOC, "repetition_penalty": 1.0, "logprobs": None, "best_of": 1}),
        (CHATS, {"messages": CHAT, "stream": True, "stream_options": USAGE, "stop": None}),
        (CHATS, {"messages": [{**CHAT[0], "type": "text"}], "seed": 1234, "stop": ["zzz"]}),
        (CHATS, {"messages": CHAT, "tools": [], "tool_choice": "auto", "store": False, **EMPTY}),
        (CHATS, {"messages": CHAT, "logit_bias": {}, "presence_penalty": 0.0, "top_k": -1}),
        (CHATS, {"messages": CHAT, "response_format": {"type": "text"}, "metadata": {"a": "b"}}),
    ],
)
def test_fields_that_ask_for_nothing_are_taken(client, path, said):
    response = client.post(path, json={**GREEDY, **said})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("content", [b'{"prompt": NaN}', b'{"a"', b"\xff\xfe", b"[]", b"[" * 3999])
def test_bodies_that_are_none(client, content):
    rejected(client, TEXTS, content)


def test_bodies_that_are_too_long(client):
    headers = {"content-type": "application/json"}
    response = client.post(TEXTS, content=b" " * 4001, headers=headers)
    assert response.status_code == 413 and response.headers["connection"] == "close"


def test_pages_and_methods_that_are_not_there(client):
    for response, status in (
        (client.get("/nothing"), 404),
        (client.get("/v1/models/"), 404),
        (client.get("/v1/models/other"), 404),
        (client.post(CHATS, json={"model": "gpt-5", "messages": CHAT}), 404),
        (client.get(TEXTS), 405),
        (client.put("/v1/models"), 405),
        (client.post(TEXTS, content=b'{"prompt": "a"}'), 415),
    ):
        assert response.status_code == status and response.json()["error"]["message"]
        assert response.headers["x-request-id"].startswith("req-")


def test_the_key_is_asked_for(engine):
    client = TestClient(HttpApplication({"tiny": engine}, limits=RequestLimits(api_key="sesame")))
    for key, status in ((None, 401), ("open", 401), ("sesame\xfc", 401), ("sesame", 200)):
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode("latin-1")}
        for page in ("/v1/models", "/metrics"):
            assert client.get(page, headers=headers).status_code == status
        assert client.post(TEXTS, headers=headers, json={"prompt": "a"}).status_code == status
    assert client.get("/health").status_code == 200
    assert "sesame" not in repr(RequestLimits(api_key="sesame"))


def test_full_queues_deadlines_and_the_end(engine, app, client, monkeypatch):
    def full(*_, **__):
        raise jaxkv.serving.QueueFull("6 requests wait already")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "submit", full)
        response = client.post(TEXTS, json={"prompt": "a"})
    assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    hasty = TestClient(HttpApplication({"tiny": engine}, limits=RequestLimits(seconds=1e-6)))
    assert hasty.post(TEXTS, json={"prompt": "a", "max_tokens": 40}).status_code == 504
    assert (
        hasty.post(DOCUMENTS, json={"text": "a"}).status_code == 504
        and not engine.documents.get_documents()
    )
    # Once the headers have gone, an error is an event.
    streamed = hasty.post(TEXTS, json={"prompt": "a", "max_tokens": 40, "stream": True})
    assert streamed.status_code == 200 and '"code":"deadline_exceeded"' in streamed.text
    server = Server(app)
    server.handle_exit(signal.SIGTERM, None)
    for response in (client.post(TEXTS, json={"prompt": "a"}), client.get("/health")):
        assert response.status_code == 503 and response.json()["error"]["code"] == "draining"
    assert client.get("/v1/models").status_code == 200 and not server.should_exit
    app.service.active += 1
    assert not asyncio.run(server.on_tick(1))
    app.service.active -= 1
    assert asyncio.run(server.on_tick(1)) and not server.cut
    server.handle_exit(signal.SIGTERM, None)
    assert server.cut and server.force_exit
    app.service.draining = False


def test_errors_of_our_own_have_a_form_and_no_text_of_prompts(engine, caplog, monkeypatch):
    client = TestClient(HttpApplication({"tiny": engine}), raise_server_exceptions=False)

    def broken(*_, **__):
        raise KeyError("secret words")

    monkeypatch.setattr(engine, "submit", broken)
    with caplog.at_level(logging.INFO, "jaxkv.serving"):
        response = client.post(TEXTS, json={"prompt": "secret words"})
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert "KeyError at broken" in caplog.text and "secret" not in caplog.text + response.text


async def posted(app, path, body, *, until, sent=None):
    """Posts a body by a client that goes once `until()` is true; what the application sends goes to the list `sent`."""
    messages, sent = (
        [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}],
        [] if sent is None else sent,
    )

    async def receive():
        if messages:
            return messages.pop()
        while not until():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)


def test_documents_end_when_their_client_goes(engine, app, caplog):
    """One in mid-prefill and three that wait; nothing of them is computed or kept."""
    with held(engine) as given_up:
        begun = []

        def all_begun():
            begun.extend([True] * ((engine.stats.prefilling, engine.stats.waiting) == (1, 3)))
            return begun

        async def main():
            await asyncio.gather(
                *(posted(app, DOCUMENTS, {"text": DOC}, until=all_begun) for _ in range(4))
            )

        with caplog.at_level(logging.INFO, "jaxkv.serving"):
            asyncio.run(asyncio.wait_for(main(), 60))
        assert caplog.text.count(f"POST {DOCUMENTS} 499") == 4 and given_up.wait(60)
    assert (
        engine.submit(DOC, max_new_tokens=2).result(60) is not None
        and not engine.documents.get_documents()
    )


def test_a_document_is_removed_if_its_client_goes_as_it_is_done(engine, app, caplog):
    def done():
        return bool(engine.documents.get_documents())

    with caplog.at_level(logging.INFO, "jaxkv.serving"):
        for _ in range(5):
            asyncio.run(posted(app, DOCUMENTS, {"text": DOC}, until=done))
            assert not done()
    assert caplog.text.count(f"POST {DOCUMENTS} 499") == 5


@pytest.mark.parametrize("stream", [False, True])
def test_requests_end_when_their_client_goes(engine, app, caplog, stream):
    """Its client is there until the first requests have begun; the last of them still waits then."""
    body = {"prompt": DOC, "n": 6, "max_tokens": 40, "ignore_eos": True, "stream": stream}
    before = engine.stats.answered
    with caplog.at_level(logging.INFO, "jaxkv.serving"):
        asyncio.run(posted(app, TEXTS, body, until=lambda: engine.stats.running))
    assert f"POST {TEXTS} 499 prompt_tokens=- new_tokens=-" in caplog.text
    # Whoever comes next has the slots.
    assert engine.submit(DOC, max_new_tokens=2).result(60) is not None
    assert engine.stats.answered < before + 6 and engine.stats.running == engine.stats.waiting == 0


def test_metrics_and_log(client, caplog):
    with caplog.at_level(logging.INFO, "jaxkv.serving"):
        client.post(CHATS, json={"messages": CHAT, **GREEDY})
        client.post(CHATS, json={})
    page = client.get("/metrics").text
    for status in (200, 400):
        assert f'jaxkv_http_requests_total{{route="{CHATS}",status="{status}"}}' in page
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxkv.serving"]
    assert len(lines) == 2 and f"POST {CHATS} 200 prompt_tokens=47 new_tokens=9" in lines[0]
    assert DOC[:9] not in caplog.text


def test_the_description_has_all_fields(client):
    page = client.get("/openapi.json").json()
    assert page["paths"].keys() >= {TEXTS, CHATS, DOCUMENTS, "/health", "/metrics"}
    fields = page["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "document", "stream_options", "top_k"} <= fields.keys()


def test_openais_client(client):
    """Answers, streams, a document, and the classes of its errors."""
    asks = openai.OpenAI(
        api_key="none", base_url="http://testserver/v1", http_client=client, max_retries=0
    )
    assert [each.id for each in asks.models.list()] == ["tiny"]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 9}
    chat = {"messages": CHAT, "extra_body": {"ignore_eos": True}, **options}
    text = alone(CHAT).text
    answer = asks.chat.completions.create(**chat)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens == 9
    pieces = asks.chat.completions.create(**chat, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == text
    document = asks.post("/documents", body={"text": DOC}, cast_to=dict[str, object])
    own = {"extra_body": {"document": document["id"]}}
    assert asks.completions.create(prompt="who?", **own, **options).choices[0].text
    with pytest.raises(openai.BadRequestError) as error:
        asks.chat.completions.create(**chat | {"temperature": 3})
    assert error.value.param == "temperature" and error.value.request_id
    with pytest.raises(openai.NotFoundError):
        asks.chat.completions.create(**chat | {"model": "gpt-5"})
