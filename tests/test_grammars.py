"""Answers under a grammar: of every kind, by the engine and over HTTP, alone and beside others."""

import json
import re
import sys
from pathlib import Path

import agents
import json_schemas
import lettered
import meshes
import numpy as np
import pytest
import tiny
from starlette.testclient import TestClient

import jaxkv
from jaxkv import Grammar, Sampling
from jaxkv.machine.compilation import StageClock
from jaxkv.serving.constraints import GrammarCompiler
from jaxkv.serving.http import HttpApplication
from jaxkv.text.answer_parsing import choose_answer_format
from jaxkv.text.chat import Chat
from jaxkv.text.grammar import build_answer_grammar

TEXTS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["x/y", "it's"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
LARK = 'start: "(" body ")"\nbody: /[ab]{2}/ | start'
# Random weights close what they have begun, and write no spaces for ever.
BIAS = {**dict.fromkeys('"}])', 8), ",": 3, " ": -4, "\n": -4, "</s>": 6}


def biased(**options):
    """How the model of random weights samples short texts."""
    ids = agents.tokenizer("mistral")._tokenizer.token_to_id
    bias = {ids(spelled): number for spelled, number in BIAS.items()}
    return Sampling(logit_bias=bias, **options)


@pytest.fixture(scope="module")
def engine():
    limits = {"slots": 4, "max_prompt_tokens": 64, "max_new_tokens": 400, "queue": 300}
    with jaxkv.Engine(agents.model("mistral"), precompile=False, **limits) as engine:
        yield engine


@pytest.fixture
def client(engine):
    return TestClient(HttpApplication({"tiny": engine}))


def is_valid(text):
    return json_schemas.follows(json.loads(text), SCHEMA)


KINDS = [
    (Grammar.from_json_schema(SCHEMA), is_valid),
    (Grammar.from_regex(r"a+/b{3}\d|\\/"), lambda text: re.fullmatch(r"a+/b{3}\d|\\/", text)),
    (Grammar.from_choices(['say "no"', "foo", "bar\nbaz"]), 'say "no" foo bar\nbaz'.__contains__),
    (Grammar(rules=LARK), lambda text: re.fullmatch(r"(\(+)[ab]{2}(\)+)", text)),
]


def test_every_kind_beside_others_as_alone(engine):
    """Slots with and without a grammar; nothing is compiled for another grammar."""
    given = []
    for at, (grammar, _) in enumerate(KINDS * 2):
        how = biased(temperature=1.0 if at % 2 else 0.0)
        given.append({"grammar": grammar, "sampling": how, "key": at, "max_new_tokens": 99})
        given.append({"max_new_tokens": 9 + at, "key": at, "sampling": Sampling()})
    prompts = ["Hi", "What is it?"]
    alone = [engine.submit(prompts[at % 2], **each).result() for at, each in enumerate(given)]
    clock = StageClock()
    with clock:
        asked = [engine.submit(prompts[at % 2], **each) for at, each in enumerate(given)]
        answers = [each.result() for each in asked]
    assert clock.programs == 0 and engine.stats.running == 0
    for at, (one, other) in enumerate(zip(answers, alone, strict=True)):
        assert one.text == other.text and one.tokens.tolist() == other.tokens.tolist()
        if at % 2 == 0:
            assert one.finish_reason == "stop" and KINDS[at // 2 % 4][1](one.text), one.text
    free = given[1]
    whole = jaxkv.generate(engine.session.params, prompts[1], policy=engine.session.policy, **free)
    assert answers[1].tokens.tolist() == whole.tokens.tolist()


def test_a_mesh_answers_as_one_device():
    """Slots of two groups, with and without a grammar."""
    limits = {"slots": 4, "max_prompt_tokens": 64, "max_new_tokens": 60, "precompile": False}
    given, found = [{"key": 5, "sampling": Sampling(), "max_new_tokens": 9}] * 2, []
    for at, (grammar, _) in enumerate(KINDS):
        how = biased(temperature=1.0 if at % 2 else 0.0)
        given.append({"grammar": grammar, "sampling": how, "key": at, "max_new_tokens": 60})
    for mesh in (None, meshes.mesh_of(2, 1)):
        with jaxkv.Engine(agents.model("mistral"), mesh=mesh, **limits) as engine:
            asked = [engine.submit("Hi", **each) for each in given]
            found.append([each.result().tokens.tolist() for each in asked])
    assert found[0] == found[1]


def test_an_end_token_only_where_the_text_may_end(engine):
    ends = engine.session.params.end_token_ids
    eager = Sampling(temperature=0, logit_bias=dict.fromkeys(ends, 100))
    shy = Sampling(temperature=0, logit_bias=dict.fromkeys(ends, -100))
    for pattern, options, text, reason in (
        ("a{3}b*", {"sampling": eager}, "aaa", "stop"),
        ("a{3}b*", {"sampling": eager, "stop_at_eos": False}, "aaa", "stop"),
        ("a{3}b*", {"sampling": shy}, "aaabbbb", "length"),
        ("a{3}b*", {"sampling": shy, "stop": ["bb"]}, "aaa", "stop"),
        # What nothing can follow ends at once, also at the limit.
        ("a{3}", {"sampling": shy}, "aaa", "stop"),
        ("a{7}", {"sampling": shy}, "aaaaaaa", "stop"),
        ("", {"sampling": shy}, "", "stop"),
    ):
        grammar = Grammar.from_regex(pattern)
        found = engine.submit("Hi", grammar=grammar, max_new_tokens=7, **options).result()
        assert (found.text, found.finish_reason) == (text, reason), (pattern, options)
        ended = not set(ends).isdisjoint(found.tokens.tolist())
        assert ended == (options["sampling"] is eager or not pattern)


def test_several_answers_and_log_probabilities(engine):
    how = biased(logprobs=2)
    grammar = Grammar.from_json_schema(SCHEMA)
    first = engine.submit("Hi", grammar=grammar, sampling=how, key=[1, 2, 3], max_new_tokens=99)
    found = [each.result() for each in (first, *first.others)]
    assert len({each.text for each in found}) > 1
    for each in found:
        assert is_valid(each.text) and len(each.logprobs.token_logprobs) == len(each.tokens)


def test_a_grammar_without_a_token_ends_one_answer(engine, client):
    """The tokenizer cannot spell it; the engine goes on, and the answer beside is as alone."""
    beside = {"max_new_tokens": 30, "key": 5, "sampling": Sampling()}
    alone = engine.submit("Hi", **beside).result()
    for rules in ('start: "é" | "ü"', 'start: "aa" "é"', 'start: "aa" ("é" | "ü")'):
        other = engine.submit("Hi", **beside)
        with pytest.raises(ValueError, match="no token can follow"):
            engine.submit("Hi", grammar=Grammar(rules=rules), key=0).result()
        assert other.result().text == alone.text
        body = {"prompt": "Hi", "guided_grammar": rules}
        response = client.post(TEXTS, json=body)
        assert response.status_code == 400, response.text
        streamed = client.post(TEXTS, json=body | {"stream": True}).text
        assert "no token can follow" in streamed.strip().splitlines()[-1]
    assert engine.stats.running == 0 and engine.error is None


def test_cancelled_and_late(engine):
    endless = {"grammar": Grammar.from_regex("a*"), "max_new_tokens": 400}
    endless["sampling"] = Sampling(temperature=0, logit_bias=dict.fromkeys((2, 17), -100))
    requests = [engine.submit("Hi", **endless) for _ in range(6)]
    next(iter(requests[0]))
    for each in requests:
        each.cancel()
    with pytest.raises(TimeoutError):
        engine.submit("Hi", deadline=1e-3, **endless).result()
    after = engine.submit("Hi", grammar=Grammar.from_choices(["foo"])).result()
    assert after.text == "foo" and all(each.cancelled for each in requests)
    assert engine.stats.running == 0


def test_two_hundred_schemas(engine):
    """Every answer follows its schema; a schema that llguidance rejects is rejected by name."""
    requests, rejected = [], 0
    for at, schema in enumerate(json_schemas.random_schemas(220)):
        options = {"sampling": biased(), "key": at, "max_new_tokens": 400}
        try:
            grammar = Grammar.from_json_schema(schema)
            requests.append((schema, engine.submit("Hi", grammar=grammar, **options)))
        except ValueError as error:
            assert str(error).startswith("grammar=")
            rejected += 1
    kinds = set()
    for schema, request in requests:
        answer = request.result()
        assert answer.finish_reason == "stop", (schema, answer.text)
        value = json.loads(answer.text)
        assert json_schemas.follows(value, schema), (schema, answer.text)
        kinds.add(type(value))
    assert len(requests) >= 200 and kinds >= {dict, list, str, int, bool, type(None)}


def test_the_validator_rejects():
    """An oracle that accepts everything shows nothing."""
    wrong = [{}, {"n": 1}, {"n": True, "kind": "x/y"}, {"n": 1.5, "kind": "x/y"}, [], None]
    wrong += [{"n": 1, "kind": "z"}, {"n": 1, "kind": "x/y", "m": 0}]
    assert not any(json_schemas.follows(each, SCHEMA) for each in wrong)
    assert json_schemas.follows({"n": 1, "kind": "x/y"}, SCHEMA)
    assert not json_schemas.follows("abc", {"anyOf": [{"type": "string", "maxLength": 2}]})
    assert not json_schemas.follows([1, 2], {"type": "array", "items": {"const": 1}})


# --- over HTTP ------------------------------------------------------------------------------------------------------

NAMED = {"name": "it", "schema": SCHEMA, "strict": True}
FORMS = [
    (CHATS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_valid),
    (TEXTS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_valid),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}, is_valid),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, lambda text: json.loads(text) == {}),
    (CHATS, {"response_format": {"type": "json_object"}}, lambda text: json.loads(text) == {}),
    (CHATS, {"guided_json": SCHEMA}, is_valid),
    (TEXTS, {"guided_json": json.dumps(SCHEMA)}, is_valid),
    (CHATS, {"structured_outputs": {"json": SCHEMA}}, is_valid),
    (TEXTS, {"guided_regex": "[ab]{3}"}, lambda text: re.fullmatch("[ab]{3}", text)),
    (
        CHATS,
        {"structured_outputs": {"regex": "[ab]{3}"}},
        lambda text: re.fullmatch("[ab]{3}", text),
    ),
    (CHATS, {"guided_grammar": LARK}, lambda text: re.fullmatch(r"(\(+)[ab]{2}(\)+)", text)),
    (TEXTS, {"structured_outputs": {"grammar": 'start: "x"'}}, "x".__eq__),
    (CHATS, {"guided_choice": ["foo", "bar"]}, "foo bar".split().__contains__),
    (TEXTS, {"structured_outputs": {"choice": ["foo"]}}, "foo".__eq__),
]


@pytest.mark.parametrize(("path", "form", "valid"), FORMS)
def test_every_form(client, path, form, valid):
    """Whole and as a stream."""
    prompt = {TEXTS: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}}.get(
        path, {"messages": [{"role": "user", "content": "Hi"}]}
    )
    how = biased()
    bias = {str(token): number for token, number in {**dict(how.logit_bias), 114: 12}.items()}
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {**prompt, **form, "seed": 3, "logit_bias": bias, most: 99}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == RESPONSES:
        text, ended = found["output"][0]["content"][0]["text"], found["status"] == "completed"
    else:
        (choice,) = found["choices"]
        text = choice["text"] if path == TEXTS else choice["message"]["content"]
        ended = choice["finish_reason"] == "stop"
    assert ended and valid(text), text
    lines = client.post(path, json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path == RESPONSES:
        pieces = [each["delta"] for each in events if each["type"].endswith("text.delta")]
    else:
        choices = [each["choices"][0] for each in events]
        pieces = [each.get("text", each.get("delta", {}).get("content", "")) for each in choices]
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "strin"}},
                }
            },
            "response_format",
        ),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 2}}, "response_format"),
        ({"guided_json": "oops"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": "["}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_grammar": "start: foo"}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json_object": True}}, "guided_json_object"),
        ({"structured_outputs": "a"}, "structured_outputs"),
    ],
)
def test_wrong_forms(client, form, param):
    for path, prompt in ((TEXTS, {"prompt": "Hi"}), (CHATS, {"messages": [agents_user()]})):
        response = client.post(path, json={**prompt, **form})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text


def agents_user():
    return {"role": "user", "content": "Hi"}


def test_nested_without_end(client):
    schema = {}
    for _ in range(900):
        schema = {"items": schema}
    response = client.post(TEXTS, json={"prompt": "Hi", "guided_json": schema})
    assert response.status_code == 400, response.text


# --- reasoning and calls ----------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
ARGUMENTS = '{"n": 7, "kind": "x/y"}'
HEAD = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
CALL = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "find", "parameters": %s}',
    "mistral": "[TOOL_CALLS]find[ARGS]%s",
    "harmony": "<|channel|>commentary to=functions.find <|constrain|>json<|message|>%s",
}
CONTENT = {"harmony": "<|channel|>final<|message|>%s"}
THOUGHTS = {"hermes": "<think>Hm {</thin</think>\n\n", "harmony": HEAD}


def accepts(kind, grammar, said):
    """Whether a whole text is an answer under a grammar."""
    model = agents.model(kind)
    matcher = GrammarCompiler(model).compile(grammar)
    taken = all(matcher.consume_token(each) for each in model.text.encode(said, bos=False))
    return taken and matcher.is_accepting()


@pytest.mark.parametrize("kind", agents.TEMPLATES)
def test_answers_in_the_formats_of_models(kind):
    text, chat = agents.tokenizer(kind), Chat(messages=[agents_user()], tools=TOOLS)
    format = choose_answer_format(text, chat)
    content, thought = Grammar.from_json_schema(SCHEMA), THOUGHTS.get(kind, "")
    said, call = CONTENT.get(kind, "%s") % ARGUMENTS, CALL[kind]
    forced = build_answer_grammar(format, text, content=None, tools=TOOLS)
    told = build_answer_grammar(format, text, content=content, tools=[])
    either = build_answer_grammar(format, text, content=content, tools=TOOLS[:1])
    for grammar, right, wrong in (
        (forced, [call % ARGUMENTS], [said, call % "{}", call % "7", "find", ""]),
        (told, [said], [call % ARGUMENTS, "find", CONTENT.get(kind, "%s") % "{}"]),
        (either, [call % ARGUMENTS, said], [call % "{}", ""]),
    ):
        for each in right:
            assert accepts(kind, grammar, each), each
            assert accepts(kind, grammar, thought + each), each
            assert not accepts(kind, grammar, each + "x"), each
        for each in wrong:
            assert not accepts(kind, grammar, each) and not accepts(kind, grammar, thought + each)
    assert accepts(kind, forced, (call % '{"any": [1]}').replace("find", "stop"))


def test_reasoning_that_the_prompt_begins():
    template = agents.TEMPLATES["hermes"].replace("'<|im_start|>assistant\\n'", "'<think>\\n'")
    text = agents.tokenizer("hermes")
    text.template = template
    format = choose_answer_format(text, Chat(messages=[agents_user()]))
    assert format.reasons
    grammar = build_answer_grammar(format, text, content=Grammar.from_regex("ok"), tools=[])
    assert accepts("hermes", grammar, "Hm.</think>\n\nok")
    assert not accepts("hermes", grammar, "ok")


# --- what it needs ----------------------------------------------------------------------------------------------------


def test_llguidance_waits_until_it_is_asked_for(engine, monkeypatch):
    for path in (Path(__file__).parent.parent / "jaxkv").rglob("*.py"):
        lines = path.read_text("utf-8").splitlines()
        assert not any(re.match(r"(import|from) llguidance", line) for line in lines), path
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"needs llguidance \(pip install 'jaxkv\[serve\]'\)"):
        engine.submit("Hi", grammar=Grammar.from_regex("a"))


def test_models_without_a_tokenizer_that_it_reads():
    for model, said in ((tiny.tiny(tiny.TWO_LAYERS), "no tokenizer"), (lettered.tiny(), "decoder")):
        with pytest.raises(ValueError, match=f"grammar='start: /a/': needs .*{said}"):
            GrammarCompiler(model).compile(Grammar.from_regex("a"))


def test_regular_expressions_are_quoted():
    matches = (("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/", "\\/"), ("[/]+", "//"), ("a\nb", "a\nb"))
    for pattern, text in matches:
        assert accepts("hermes", Grammar.from_regex(pattern), text), pattern
        assert re.fullmatch(pattern, text)


def test_masks_do_not_change_dtype_or_shape(engine):
    """The compiled loop takes them: a wrong word order would sample other tokens."""
    for letter in "@`az~":
        found = engine.submit("Hi", grammar=Grammar.from_regex(f"{letter}{{5}}")).result()
        assert found.text == letter * 5 and found.tokens.dtype == np.int32
