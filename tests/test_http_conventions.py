"""What clients of OpenAI's responses, Anthropic's messages and vLLM expect of the server; several API keys."""

import asyncio
import itertools
import json
import logging
import signal
from importlib import metadata

import jax
import lettered
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lettered import DOC
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import jaxkv
from jaxkv.cli.serving import read_api_keys
from jaxkv.engine.sampling import Sampling
from jaxkv.serving import PrefixCacheConfig
from jaxkv.serving.http import HttpApplication
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.server import Server

POLICY = jaxkv.KNorm(budget=16)
SLOTS = {"slots": 2, "max_prompt_tokens": 64, "max_new_tokens": 40, "max_question_tokens": 16}
TEXTS, CHATS, DOCUMENTS = "/v1/completions", "/v1/chat/completions", "/v1/documents"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BRIEF = "be brief"
TALK = [{"role": "system", "content": BRIEF}, {"role": "user", "content": DOC[:19]}]
HELLO = [{"role": "user", "content": DOC[:19]}]
WHO = [{"role": "user", "content": "who?"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
RESPONSE = {"input": DOC[:19], "max_output_tokens": 9, **GREEDY}
MESSAGE = {"messages": HELLO, "max_tokens": 9, **GREEDY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def engine(folder):
    # A second turn is what `generate` answers to the whole chat.
    options = SLOTS | {"documents": folder, "prefix_cache": PrefixCacheConfig(policies="none")}
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    return TestClient(HttpApplication({"tiny": engine}))


def served(engine, **limits):
    return TestClient(HttpApplication({"tiny": engine}, limits=RequestLimits(**limits)))


def alone(prompt, **options):
    """The answer of `generate` with this engine's policy."""
    options = {"max_new_tokens": 9, "stop_at_eos": False, **options}
    return jaxkv.generate(lettered.tiny(), prompt, policy=POLICY, **options)


def events(response):
    """(name, object) of each event of a stream; an object's type is its event's name."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        found.append((told["type"], told))
    return found


# --- ids, tokens, versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"trace 7/a", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"", False),
        (b"caf\xc3\xa9", False),
        (b"a\tb", False),
    ],
)
def test_a_clients_request_id_is_echoed_and_logged(client, caplog, sent, kept):
    with caplog.at_level(logging.INFO, "jaxkv.serving"):
        response = client.get("/v1/models", headers={b"x-request-id": sent})
        missing = client.get("/v1/nothing", headers={b"x-request-id": sent})
    for each, line in zip((response, missing), caplog.messages, strict=True):
        name = each.headers["x-request-id"]
        assert (name == sent.decode()) if kept else name.startswith("req-")
        assert line.startswith(f"{name} GET /v1/")


def test_texts_and_chats_are_tokenized_as_prompts_are(client):
    text = lettered.characters()
    found = client.post("/tokenize", json={"prompt": DOC, "return_token_strs": True}).json()
    wanted = text.encode(DOC, bos=True)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (wanted, len(wanted), 104)
    assert found["token_strs"] == ["<s>", *DOC]
    assert client.post("/detokenize", json={"tokens": wanted}).json() == {"prompt": f"<s>{DOC}"}
    bare = client.post("/tokenize", json={"prompt": DOC, "add_special_tokens": False}).json()
    assert bare["tokens"] == wanted[1:] and bare["token_strs"] is None
    for prompt in ("", "</s>"):
        sent = {"prompt": prompt, "model": "tiny"}
        assert client.post("/tokenize", json=sent).json()["tokens"] == text.encode(prompt, bos=True)
    # Special tokens in a message are text; the template writes its own.
    talk = [*TALK[:1], {"role": "user", "content": "a</s>"}]
    found = client.post("/tokenize", json={"messages": talk}).json()
    body = {"messages": talk, **GREEDY, "max_tokens": 1}
    used = client.post(CHATS, json=body).json()["usage"]["prompt_tokens"]
    assert found["count"] == used and found["tokens"].count(lettered.EOS) == 1
    assert found["tokens"].count(lettered.BOS) == 1
    sent = {"messages": talk, "add_generation_prompt": False}
    shorter = client.post("/tokenize", json=sent).json()
    assert shorter["tokens"] == found["tokens"][:-1]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [96]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        (RESPONSES, {}, 400, "input"),
        (RESPONSES, {"input": []}, 400, "input"),
        (RESPONSES, {"input": "a" * 65}, 400, "input"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, 400, "input"),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}]}, 400, "tools"),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": "a"}]}, 400, "input"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "some"}}, 400, "reasoning"),
        (RESPONSES, {"input": "a", "tool_choice": {"type": "code"}}, 400, "tool_choice"),
        (RESPONSES, {"input": "a", "store": True}, 400, "store"),
        (RESPONSES, {"input": "a", "n": 2}, 400, "n"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
        (RESPONSES, {"input": "a", "document": "doc-0"}, 404, "document"),
    ],
)
def test_what_cannot_be_is_rejected_by_name(client, path, body, status, param):
    response = client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_models_versions_and_pings(engine):
    client = served(engine)
    (model,) = client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 104
    assert model.keys() >= {"id", "object", "created", "owned_by"}
    assert client.get("/version").json() == {"version": metadata.version("jaxkv")}
    for response in (client.get("/ping"), client.post("/ping"), client.post("/ping", content="a")):
        assert response.status_code == 200 and response.json() == {"status": "ok"}
    Server(client.app).handle_exit(signal.SIGTERM, None)
    for response in (client.get("/ping"), client.post("/ping")):
        assert response.status_code == 503


# --- OpenAI's responses -----------------------------------------------------------------------------------------------


def test_responses_are_chats_in_another_form(client):
    """By OpenAI's client: complete, as a stream, and with an earlier answer as input."""
    options = {"base_url": "http://testserver/v1", "http_client": client, "max_retries": 0}
    asks = openai.OpenAI(api_key="none", **options)
    body = {"model": "tiny", "temperature": 0, "max_output_tokens": 9, "metadata": {"a": "b"}}
    body |= {"extra_body": {"ignore_eos": True}, "store": False, "tools": []}
    text = alone(TALK).text
    answer = asks.responses.create(input=DOC[:19], instructions=BRIEF, **body)
    assert answer.output_text == text and answer.metadata == {"a": "b"}
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    used = client.post(CHATS, json={"messages": TALK, "max_tokens": 9, **GREEDY}).json()["usage"]
    counted = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens)
    assert counted == (used["prompt_tokens"], 9, used["total_tokens"])
    parts = [{"type": "input_text", "text": each} for each in (DOC[:9], DOC[9:19])]
    given = [{"role": "developer", "content": BRIEF}, {"role": "user", "content": parts}]
    assert asks.responses.create(input=given, **body).output_text == text
    given = [*given, *answer.output, {"role": "user", "content": "b"}]
    talk = [*TALK, {"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
    assert asks.responses.create(input=given, **body).output_text == alone(talk).text
    with asks.responses.stream(input=DOC[:19], instructions=BRIEF, **body) as stream:
        pieces = [each.delta for each in stream if each.type == "response.output_text.delta"]
    assert "".join(pieces) == text and len(pieces) > 2
    with pytest.raises(openai.NotFoundError):
        asks.responses.create(input="a", **body | {"model": "gpt-5"})


def test_responses_follow_settings_and_end_at_stop_strings(client):
    sampled = {"input": DOC[:19], "max_output_tokens": 9, "ignore_eos": True}
    key, drawn = jax.random.key(7), Sampling(temperature=0.5, top_p=0.9)
    found = client.post(RESPONSES, json=sampled | {"seed": 7, "temperature": 0.5, "top_p": 0.9})
    (item,) = found.json()["output"]
    assert item["content"][0]["text"] == alone(HELLO, sampling=drawn, key=key).text
    text = alone(HELLO).text
    found = client.post(RESPONSES, json=RESPONSE | {"stop": text[4]}).json()
    assert found["output"][0]["content"][0]["text"] == text[: text.index(text[4])]
    assert (found["status"], found["incomplete_details"]) == ("completed", None)


def test_events_of_responses_are_numbered_and_complete(client):
    whole = client.post(RESPONSES, json=RESPONSE).json()
    names, found = zip(
        *events(client.post(RESPONSES, json=RESPONSE | {"stream": True})), strict=True
    )
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    begun = ["created", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    texts = [name for name, _ in itertools.groupby(names)]
    assert texts == [f"response.{each}" for each in (*begun, "output_text.delta", *ended)]
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    own = {"id", "created_at", "output"}
    assert {name: last[name] for name in last.keys() - own} == {
        name: whole[name] for name in whole.keys() - own
    }
    (item,) = last["output"]
    assert item["content"] == whole["output"][0]["content"] and first["id"] == last["id"]
    assert {each["item_id"] for each in found if "item_id" in each} == {item["id"]}
    pieces = [each["delta"] for each in found if each["type"] == "response.output_text.delta"]
    assert "".join(pieces) == item["content"][0]["text"] and len(pieces) > 2


# --- Anthropic's messages ---------------------------------------------------------------------------------------------


def test_messages_are_chats_in_another_form(client):
    text = alone(TALK).text
    system = [{"type": "text", "text": BRIEF, "cache_control": {"type": "ephemeral"}}]
    blocks = [{"type": "text", "text": each} for each in (DOC[:9], DOC[9:19])]
    used = client.post(CHATS, json={"messages": TALK, "max_tokens": 9, **GREEDY}).json()["usage"]
    for more in (
        {"system": BRIEF},
        {"system": system, "messages": [{"role": "user", "content": blocks}]},
        {"system": BRIEF, "metadata": {"user_id": "u"}, "tools": [], "model": "tiny"},
    ):
        headers = {"anthropic-version": "2023-06-01"}
        found = client.post(MESSAGES, json=MESSAGE | more, headers=headers).json()
        assert found["content"] == [{"type": "text", "text": text}]
        told = [found[name] for name in ("type", "role", "model", "stop_reason", "stop_sequence")]
        assert told == ["message", "assistant", "tiny", "max_tokens", None]
        counts = {"input_tokens": used["prompt_tokens"], "output_tokens": 9}
        assert found["usage"] == {**counts, "cache_read_input_tokens": 0}
    text = alone(HELLO).text
    found = client.post(MESSAGES, json=MESSAGE | {"stop_sequences": ["zzz", text[4]]}).json()
    assert found["content"][0]["text"] == text[: text.index(text[4])]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[4])
    drawn = {"seed": 7, "temperature": 0.5, "top_k": 5}
    found = client.post(MESSAGES, json=MESSAGE | drawn).json()
    sampling = Sampling(temperature=0.5, top_k=5)
    wanted = alone(HELLO, sampling=sampling, key=jax.random.key(7)).text
    assert found["content"][0]["text"] == wanted


def test_the_end_of_a_turn_has_its_own_reason(client, engine, monkeypatch):
    """The tiny model's answer ends at its first token, once that is an end token."""
    first = int(alone(HELLO).tokens[0])
    monkeypatch.setattr(type(engine.session.params), "end_token_ids", (first,))
    found = client.post(MESSAGES, json=MESSAGE | {"ignore_eos": False}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    assert found["usage"]["output_tokens"] == 1
    found = client.post(RESPONSES, json=RESPONSE | {"ignore_eos": False}).json()
    assert found["status"] == "completed"


def test_events_of_messages_are_complete(client):
    whole = client.post(MESSAGES, json=MESSAGE).json()
    found = events(client.post(MESSAGES, json=MESSAGE | {"stream": True}))
    names = [name for name, _ in itertools.groupby(name for name, _ in found)]
    block = [f"content_block_{each}" for each in ("start", "delta", "stop")]
    assert names == ["message_start", *block, "message_delta", "message_stop"]
    start = found[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["model"] == "tiny"
    deltas = [told["delta"] for name, told in found if name == "content_block_delta"]
    assert {each["type"] for each in deltas} == {"text_delta"} and len(deltas) > 2
    assert "".join(each["text"] for each in deltas) == whole["content"][0]["text"]
    end = found[-2][1]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


def test_errors_of_messages_have_anthropics_form(client, engine):
    locked = served(engine, api_key="sesame")
    long = [{"role": "user", "content": "a" * 65}]
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for response, status, kind in (
        (client.post(MESSAGES, json={"messages": HELLO}), 400, "invalid_request_error"),
        (client.post(MESSAGES, json=MESSAGE | {"messages": long}), 400, "invalid_request_error"),
        (client.post(MESSAGES, json=MESSAGE | {"messages": image}), 400, "invalid_request_error"),
        (client.post(MESSAGES, json=MESSAGE | {"tools": [{}]}), 400, "invalid_request_error"),
        (client.post(MESSAGES, json=MESSAGE | {"model": "gpt-5"}), 404, "not_found_error"),
        (client.post(MESSAGES, content="a"), 415, "invalid_request_error"),
        (client.get(MESSAGES), 405, "invalid_request_error"),
        (locked.post(MESSAGES, json=MESSAGE), 401, "authentication_error"),
    ):
        assert response.status_code == status, response.text
        told = response.json()
        assert told["type"] == "error" and told["error"].keys() == {"type", "message"}
        assert told["error"]["type"] == kind and told["error"]["message"]
    headers = {"x-api-key": "sesame"}
    assert locked.post(MESSAGES, json=MESSAGE, headers=headers).status_code == 200


def test_an_error_in_a_stream_is_its_last_event(engine):
    hasty = served(engine, seconds=1e-6)
    ((name, told),) = events(hasty.post(MESSAGES, json=MESSAGE | {"stream": True}))
    assert name == "error" and told["error"]["type"] == "timeout_error"
    ((name, told),) = events(hasty.post(RESPONSES, json=RESPONSE | {"stream": True}))
    assert name == "error" and told["code"] == "deadline_exceeded" and told["sequence_number"] == 0


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_what_means_the_same_has_vllms_names(client):
    def read():
        families = text_string_to_metric_families(client.get("/metrics").text)
        return {
            (each.name, *sorted(each.labels.items())): each.value
            for family in families
            for each in family.samples
            if each.name.startswith("vllm:")
        }

    def grown(name, *labels):
        key = (f"vllm:{name}", *sorted([*labels, ("model_name", "tiny")]))
        return after.get(key, 0) - before.get(key, 0)

    before = read()
    body = {"messages": TALK, "max_tokens": 9, "n": 2, **GREEDY}
    used = client.post(CHATS, json=body).json()["usage"]
    after = read()
    assert grown("generation_tokens_total") == 18
    assert grown("prompt_tokens_total") == 2 * used["prompt_tokens"]
    assert grown("request_success_total", ("finished_reason", "length")) == 2
    assert grown("request_success_total", ("finished_reason", "stop")) == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert grown(f"{name}_count") == 2 and grown(f"{name}_sum") > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[(f"vllm:{name}", ("model_name", "tiny"))] == 0


# --- API keys ---------------------------------------------------------------------------------------------------------


def test_documents_belong_to_the_key_that_posted_them(engine, folder):
    client = served(engine, api_key="root", api_keys={"one": "ann", "two": "ann", "three": "bob"})

    def asked(key, path, method="GET", **options):
        headers = {"Authorization": f"Bearer {key}"}
        return client.request(method, path, headers=headers, **options)

    made = asked("one", DOCUMENTS, "POST", json={"text": DOC}).json()
    page, question = f"{DOCUMENTS}/{made['id']}", {"document": made["id"], **GREEDY}
    bodies = {
        CHATS: {"messages": WHO, **question},
        TEXTS: {"prompt": "who?", **question},
        RESPONSES: {"input": "who?", **question},
        MESSAGES: {"messages": WHO, "max_tokens": 9, **question},
    }
    for key, seen in (("one", True), ("two", True), ("three", False), ("root", True)):
        listed = [each["id"] for each in asked(key, DOCUMENTS).json()["data"]]
        assert listed == [made["id"]] * seen
        responses = [asked(key, page), asked(key, f"{page}/kept")]
        responses += [asked(key, path, "POST", json=body) for path, body in bodies.items()]
        assert {each.status_code for each in responses} == {200 if seen else 404}, key
    assert asked("four", page).status_code == asked("", page).status_code == 401
    assert asked("three", page, "DELETE").status_code == 404
    # The owner is saved with the document.
    options = {**SLOTS, "documents": folder, "start": False}
    with jaxkv.Engine(lettered.tiny(), policy=POLICY, **options) as other:
        again = served(other, api_keys={"one": "ann", "three": "bob"})
        for key, status in (("one", 200), ("three", 404)):
            headers = {"x-api-key": key}
            assert again.get(page, headers=headers).status_code == status
    assert asked("two", page, "DELETE").status_code == 200


def test_a_request_knows_its_client(engine):
    app = HttpApplication({"tiny": engine}, limits=RequestLimits(api_keys={"one": "ann"}))

    async def main():
        sent, scope = [], {"type": "http", "method": "GET", "path": "/v1/models"}
        scope |= {"query_string": b"", "root_path": "", "headers": [(b"x-api-key", b"one")]}

        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"], scope["state"]["record"].client

    assert asyncio.run(main()) == (200, "ann")


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team: a\n\nann:sk-1\n  bob : sk-2 \nsk-3\n")
    file.chmod(0o600)
    found = read_api_keys(str(file))
    assert found == {"sk-1": "ann", "sk-2": "bob", "sk-3": found["sk-3"]}
    assert len(found["sk-3"]) == 8 and "sk" not in found["sk-3"]
    assert "sk-1" not in repr(RequestLimits(api_keys=found))
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="other users"):
        assert read_api_keys(str(file)) == found
    for text in ("# none\n", "ann:sk-1\nbob:\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="--api-keys="):
            read_api_keys(str(file))
    with pytest.raises(ValueError, match="api_key="):
        RequestLimits(api_keys={"a b": "ann"})


# --- anything ---------------------------------------------------------------------------------------------------------

TYPES = "text function_call function_call_output reasoning tool_use tool_result thinking function"
PLAIN = (
    st.sampled_from(TYPES.split())
    | st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(-2, 2)
    | st.text(max_size=9)
)
NAMES = st.sampled_from(
    "type role content text input messages system prompt tokens max_tokens max_output_tokens stop "
    "stop_sequences temperature top_p top_k metadata store tools instructions model stream n "
    "name arguments call_id output tool_choice tool_use_id thinking reasoning effort id".split()
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    path=st.sampled_from([RESPONSES, MESSAGES, "/tokenize", "/detokenize"]),
    body=st.dictionaries(NAMES, VALUES, max_size=6),
)
def test_no_body_is_an_error_of_the_server(client, path, body):
    content = json.dumps(body | {"max_tokens": 2} if path == MESSAGES else body)
    headers = {"content-type": "application/json"}
    response = client.post(path, content=content, headers=headers)
    assert response.status_code in (200, 400, 404), (body, response.text)


def test_a_second_turn_reuses_the_first_of_the_same_client():
    """Tokens that were not read again are told as cached; another key's conversations are not shared."""
    options = {"slots": 2, "max_prompt_tokens": 80, "max_question_tokens": 32, "max_new_tokens": 8}
    with jaxkv.Engine(lettered.tiny(), policy=jaxkv.FullKV(), **options) as engine:
        limits = RequestLimits(api_keys={"one": "ada", "two": "bob"})
        client = TestClient(HttpApplication({"tiny": engine}, limits=limits))

        def ask(prompt, key):
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            sent = client.post("/v1/completions", json=body, headers={"x-api-key": key}).json()
            cached = sent["usage"]["prompt_tokens_details"]["cached_tokens"]
            return sent["choices"][0]["text"], cached

        text, cached = ask(DOC, "one")
        assert cached == 0
        following = DOC + text + " and"
        again, cached = ask(following, "one")
        assert cached > len(DOC) and engine.stats.reused_tokens == cached
        assert ask(following, "two") == (again, 0)
        told = client.get("/metrics", headers={"x-api-key": "one"}).text
        assert f'vllm:prefix_cache_hits_total{{model_name="tiny"}} {cached}.0' in told
