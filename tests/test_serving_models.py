"""Several policies in one server: models, their documents, what is kept of these, metrics, and the page at /."""

import base64
import hashlib
import html.parser
import re

import jax
import lettered
import numpy as np
import pytest
from lettered import DOC
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import jaxkv
from jaxkv.cli.serving import open_engines, parse_further_policies
from jaxkv.serving import slot_memory
from jaxkv.serving.http import HttpApplication
from jaxkv.serving.limits import RequestLimits
from jaxkv.text.shown import decode_token_texts

POLICY = jaxkv.KNorm(budget=16)
CHATS, DOCUMENTS = "/v1/chat/completions", "/v1/documents"
OPTIONS = {"slots": 1, "max_prompt_tokens": 64, "max_question_tokens": 16, "queue": 4}
OPTIONS["max_new_tokens"] = 16
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
QUESTION = {"messages": [{"role": "user", "content": "who?"}], **GREEDY}


@pytest.fixture(scope="module")
def client():
    with (
        jaxkv.Engine(lettered.tiny(), policy=POLICY, **OPTIONS) as small,
        jaxkv.Engine(lettered.tiny(), **OPTIONS) as full,
    ):
        yield TestClient(
            HttpApplication({"tiny": small, "tiny:full": full}, limits=RequestLimits())
        )


def engine(client, name="tiny"):
    return client.app.service.models[name]


def refused(response, status, param):
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_all_models_are_listed_with_policy_and_budget(client):
    small, full = client.get("/v1/models").json()["data"]
    assert (small["id"], small["policy"], small["budget"]) == ("tiny", "KNorm(budget=16)", 16)
    assert (full["id"], full["policy"], full["budget"]) == ("tiny:full", "FullKV()", None)
    assert (
        small["own_budget"]
        and not full["own_budget"]
        and full["full_cache"]
        and not small["full_cache"]
    )
    assert client.get("/v1/models/tiny:full").json() == full


def test_a_body_chooses_by_model(client):
    chat = [{"role": "user", "content": DOC}]
    options = {"max_new_tokens": 5, "stop_at_eos": False}
    for name, policy in (("tiny", POLICY), ("tiny:full", jaxkv.FullKV())):
        found = client.post(CHATS, json={"messages": chat, **GREEDY, "model": name}).json()
        alone = jaxkv.generate(lettered.tiny(), chat, policy=policy, **options)
        assert found["model"] == name and found["choices"][0]["message"]["content"] == alone.text
    refused(client.post(CHATS, json={**QUESTION, "model": "tiny:knorm"}), 404, "model")


def test_documents_belong_to_their_model(client):
    made = client.post(DOCUMENTS, json={"text": DOC, "model": "tiny:full"}).json()
    assert made["model"] == "tiny:full" and made["rows"] == made["tokens"] == 45
    assert made in client.get(DOCUMENTS).json()["data"]
    cache = jaxkv.prefill(lettered.tiny(), DOC)
    text = jaxkv.generate(
        lettered.tiny(), "who?", cache=cache, max_new_tokens=5, stop_at_eos=False
    ).text
    # A body without a model asks the document's own.
    for model in ("tiny:full", None):
        found = client.post(CHATS, json={**QUESTION, "document": made["id"], "model": model}).json()
        assert found["model"] == "tiny:full" and found["choices"][0]["message"]["content"] == text
    body = {**QUESTION, "document": made["id"], "model": "tiny"}
    refused(client.post(CHATS, json=body), 400, "document")
    refused(client.post(CHATS, json={**body, "model": "other"}), 404, "model")
    refused(client.post(DOCUMENTS, json={"text": DOC, "model": "other"}), 404, "model")
    assert client.delete(f"{DOCUMENTS}/{made['id']}").json()["deleted"]
    refused(client.post(CHATS, json={**QUESTION, "document": made["id"]}), 404, "document")


@pytest.mark.parametrize("budget", [16, 9])
def test_what_is_kept_is_what_the_cache_holds(client, budget):
    made = client.post(DOCUMENTS, json={"text": DOC, "budget": budget}).json()
    cache = jaxkv.prefill(lettered.tiny(), DOC, policy=jaxkv.KNorm(budget=budget))
    holds = cache.mask_kept_tokens(0, 45)
    layers, heads, _ = holds.shape
    assert made["rows"] == budget and made["full_bytes"] == cache.full_nbytes
    assert (
        made["kept_bytes"]
        == budget * layers * heads * cache.entry_bytes
        == cache.kept_nbytes
        < made["bytes"]
    )
    path = f"{DOCUMENTS}/{made['id']}/kept"
    found = client.get(path).json()
    # The template's own, and the question's turn is still open.
    assert "".join(found["pieces"]) == f"<s>[{DOC}" and found["special"] == [0]
    assert (found["layers"], found["heads"], found["pairs"]) == (layers, heads, layers * heads)
    assert found["kept"] == holds.sum(axis=(0, 1)).tolist() and len(set(found["kept"])) > 1
    one = client.get(path, params={"layer": 1}).json()
    assert one["kept"] == holds[1].sum(axis=0).tolist()
    assert one["pairs"] == heads and one["layer"] == 1
    one = client.get(path, params={"layer": 0, "head": 1}).json()
    assert one["kept"] == holds[0, 1].astype(int).tolist() and sum(one["kept"]) == budget


def test_numbers_that_are_none_are_refused(client):
    path = f"{DOCUMENTS}/{client.post(DOCUMENTS, json={'text': DOC}).json()['id']}/kept"
    kept = client.get(path).json()
    for query, param in (
        (f"layer={kept['layers']}", "layer"),
        ("layer=", "layer"),
        (f"layer=0&head={kept['heads']}", "head"),
        ("head=0", "head"),
        ("layer=0&hed=0", "hed"),
    ):
        refused(client.get(f"{path}?{query}"), 400, param)
    refused(client.get(f"{DOCUMENTS}/doc-0/kept"), 404, "document")
    refused(client.post(DOCUMENTS, json={"text": DOC, "budget": 17}), 400, "budget")
    refused(
        client.post(DOCUMENTS, json={"text": DOC, "budget": 4, "model": "tiny:full"}), 400, "budget"
    )


def test_documents_on_disk_remember_what_is_kept(tmp_path):
    made = {"policy": POLICY, "documents": tmp_path, "document_bytes": 0}
    given = []
    # Slots of another size take them as well.
    for new in (16, 48):
        with jaxkv.Engine(lettered.tiny(), **made, **OPTIONS | {"max_new_tokens": new}) as engine:
            # Of the second engine's two documents one was there.
            engine.document(DOC, budget=None if given else 9)
            client = TestClient(HttpApplication({"tiny": engine}))
            found = [each["id"] for each in client.get(DOCUMENTS).json()["data"]]
            given.append({name: client.get(f"{DOCUMENTS}/{name}/kept").json() for name in found})
            for name in found:
                body = {**QUESTION, "document": name}
                assert client.post(CHATS, json=body).status_code == 200
    (name,) = given[0]
    assert len(given[1]) == 2 and given[1][name] == given[0][name]
    assert sum(given[0][name]["kept"]) == 9 * given[0][name]["pairs"]
    # A changed file is left out, with a notice.
    path = tmp_path / f"{name}.json"
    path.write_text(re.sub('"bits": "....', '"bits": "AAAA', path.read_text()))
    with jaxkv.Engine(lettered.tiny(), **made, **OPTIONS) as engine:
        (other,) = engine.documents.get_documents()
        assert other.id in given[1] and other.id != name
        # One whose cache cannot be read is rejected without the server's path.
        (tmp_path / other.id / "jaxkv.json").write_text("{")
        client = TestClient(HttpApplication({"tiny": engine}))
        response = client.post(CHATS, json={**QUESTION, "document": other.id})
        refused(response, 410, "document")
        assert response.json()["error"]["code"] == "document_unreadable"
        assert str(tmp_path) not in response.text


def test_engines_that_run_side_by_side_share_a_folder_of_documents(tmp_path):
    options = {"policy": POLICY, "documents": tmp_path, **OPTIONS}
    with (
        jaxkv.Engine(lettered.tiny(), **options) as one,
        jaxkv.Engine(lettered.tiny(), **options) as other,
    ):
        made = one.document(DOC)
        assert other.documents.get_documents() == [made]
        ask = {"document": made, "max_new_tokens": 5}
        assert other.submit("who?", **ask).result().text == one.submit("who?", **ask).result().text
        other.documents.remove_document(made.id)
        assert one.documents.get_documents() == []
        with pytest.raises(ValueError, match="document"):
            one.submit("who?", **ask)


def test_metrics_have_a_label_for_the_model(client):
    def read():
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [each for family in families for each in family.samples]
        return {(each.name, *each.labels.values()): each.value for each in samples}

    before = read()
    client.post(CHATS, json={**QUESTION, "model": "tiny:full"})
    after, tokens = read(), "jaxkv_tokens_total"
    assert after[(tokens, "tiny:full")] == before[(tokens, "tiny:full")] + 5
    assert after[(tokens, "tiny")] == before[(tokens, "tiny")]
    assert after[("jaxkv_slots", "tiny")] == after[("jaxkv_slots", "tiny:full")] == 1
    assert ("jaxkv_answer_seconds_count", "tiny") in after


def test_a_failed_engine_is_named(client, monkeypatch):
    monkeypatch.setattr(engine(client, "tiny:full"), "error", MemoryError("none is left"))
    response = client.get("/health")
    assert (
        response.status_code == 503
        and "tiny:full has failed" in response.json()["error"]["message"]
    )


class Page(html.parser.HTMLParser):
    """Attributes of all elements, and the texts within script and style."""

    def __init__(self, text):
        super().__init__()
        self.attributes, self.inside, self.at = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.at = tag
        self.attributes += attrs

    def handle_data(self, data):
        self.inside[self.at] = self.inside.get(self.at, "") + data

    def handle_endtag(self, tag):
        self.at = None


def test_the_page_runs_its_own_script_alone(client):
    locked = TestClient(
        HttpApplication({"tiny": engine(client)}, limits=RequestLimits(api_key="sesame"))
    )
    response = locked.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert response.headers["x-content-type-options"] == "nosniff"
    page, allowed = Page(response.text), response.headers["content-security-policy"]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(page.inside[tag].encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}';" in allowed
    assert allowed.startswith("default-src 'none'") and "unsafe" not in allowed
    names = [name for name, _ in page.attributes]
    assert not any(name.startswith("on") or name in ("style", "src") for name in names)
    assert [value for name, value in page.attributes if name == "href"] == ["data:,"]
    assert "innerHTML" not in response.text and "//" not in re.sub(
        r"// .*", "", page.inside["script"]
    )
    assert client.post("/", json={}).status_code == 405


def test_pieces_join_to_the_text_and_special_tokens_are_marked():
    text = lettered.characters()
    pieces = decode_token_texts([1, *text.encode("a b", bos=False), 2], text)
    assert pieces.texts == ["<s>", "a", " ", "b", "</s>"] and pieces.special == [0, 4]
    assert decode_token_texts([], text) == ([], [])


def test_further_policies_share_the_budget_unless_they_have_one():
    found = parse_further_policies(
        ["full", "snapkv --window 8", "adakv --budget 40, knorm"], POLICY, "tiny"
    )
    assert found == {
        "tiny:full": jaxkv.FullKV(),
        "tiny:snapkv-window-8": jaxkv.SnapKV(budget=16, window=8),
        "tiny:adakv-budget-40": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=40)),
        "tiny:knorm": jaxkv.KNorm(budget=16),
    }
    for given, said in (
        (["full", "full"], "repeated policy"),
        (["snapkv --beams 3"], "--also='snapkv"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_further_policies(given, POLICY, "tiny")


def test_each_policy_keeps_documents_in_a_folder_of_its_own(tmp_path):
    policies = {"tiny": POLICY, "tiny:full": jaxkv.FullKV()}
    with open_engines(lettered.tiny(), policies, folder=str(tmp_path), **OPTIONS) as made:
        ids = {name: each.document(DOC).id for name, each in made.items()}
    assert [path.stem for path in tmp_path.glob("*.json")] == [ids["tiny"]]
    assert [path.stem for path in (tmp_path / "full").glob("*.json")] == [ids["tiny:full"]]
    for each in made.values():
        with pytest.raises(jaxkv.serving.EngineClosed):
            each.submit(DOC)


def test_engines_share_the_free_memory(client, monkeypatch):
    monkeypatch.setattr(slot_memory.memory, "available_bytes", lambda device: 1000)
    device = jax.devices()[0]
    assert slot_memory.compute_memory_share(2, promised=0, device=device) == 0.5
    assert slot_memory.compute_memory_share(1, promised=250, device=device) == 0.75
    session = engine(client, "tiny:full").session
    limits = {"max_prompt": 64, "max_new_tokens": 16, "max_question": 16}
    monkeypatch.setattr(slot_memory.memory, "available_bytes", lambda device: 3_000_000)
    whole, half = (
        slot_memory.count_fitting_slots(session, **limits, share=share) for share in (1.0, 0.5)
    )
    assert 1 <= half < whole / 1.5 and whole < 64
    np.testing.assert_allclose(whole, 2 * half, atol=8)
