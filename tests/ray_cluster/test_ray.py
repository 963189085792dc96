"""A local Ray cluster: two replicas answer as `generate` does, documents are found through the router, one is killed.

It runs in an environment of its own, `make test-ray`.
"""

import concurrent.futures
import json
import os
import shutil
import signal
import time
from pathlib import Path

import httpx2
import lettered
import psutil
import pytest
import ray
from ray import serve

import jaxkv
from jaxkv import cli
from jaxkv.serving.ray import app

ROOT = Path(__file__).parent.parent.parent
PORT = 18437
CHATS, DOCUMENTS = "/v1/chat/completions", "/v1/documents"
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
POLICY = jaxkv.KNorm(budget=16)
SIZES = {"slots": 2, "max_prompt_tokens": 64, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder with a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("ray") / "model"
    shutil.copytree(lettered.FOLDER, folder, copy_function=shutil.copyfile)
    (folder / "tokenizer.json").write_text(lettered.characters().tokenizer_json())
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": lettered.TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def cluster(folder):
    variables = {
        "PYTHONPATH": str(ROOT),
        "JAXKV_CACHE": str(folder.parent),
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
    }
    environment = {"env_vars": {**variables, "NPROC": "24", "JAX_PLATFORMS": "cpu"}}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def client(cluster, folder):
    args = {
        "model": str(folder),
        "name": "tiny",
        "replicas": 2,
        "policy": "knorm",
        "policy_options": {"budget": 16},
    }
    more = {
        "queue": 64,
        "timeout": 60,
        "documents": str(folder.parent / "documents"),
        "max_question_tokens": 16,
    }
    serve.start(http_options={"port": PORT})
    serve.run(app({**args, **SIZES, **more}))
    with httpx2.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=90, trust_env=False) as client:
        ready(client)
        yield client


def ready(client):
    """Waits until both replicas answer: an unknown document is then known not to be there."""
    for _ in range(120):
        if client.get(f"{DOCUMENTS}/none").status_code == 404:
            return
        time.sleep(0.5)
    raise AssertionError("a replica does not answer")


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **GREEDY, **more}


def alone(text, new=9):
    options = {"policy": POLICY, "max_new_tokens": new, "stop_at_eos": False}
    return jaxkv.generate(lettered.tiny(), [{"role": "user", "content": text}], **options).text


def content(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def process_of(name):
    """The process of a replica."""
    found = [
        each
        for each in psutil.process_iter(["cmdline"])
        if f"ServeReplica:default:{name}" in str(each.info)
    ]
    (process,) = found
    return process


def test_all_are_answered_as_generate_does(client):
    texts = [lettered.DOC[: 9 + at] for at in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda text: client.post(CHATS, json=chat(text)), texts))
    assert [content(each) for each in found] == [alone(text) for text in texts]
    with client.stream("POST", CHATS, json=chat(texts[0], stream=True)) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and "".join(pieces) == alone(texts[0])
    refused = client.post(CHATS, json=chat("a", tools=[1]))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    assert (
        client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        and client.get("/health").status_code == 200
    )


def test_documents_are_asked_wherever_they_lie(client):
    texts = [lettered.DOC[at : at + 20] for at in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda text: client.post(DOCUMENTS, json={"text": text}).json()["id"], texts)
        )
    assert [each["id"] for each in client.get(DOCUMENTS).json()["data"]] == sorted(made)
    for text, name in zip(texts, made, strict=True):
        cache = jaxkv.prefill(lettered.tiny(), text, policy=POLICY)
        expected = jaxkv.generate(
            lettered.tiny(), "why", cache=cache, max_new_tokens=9, stop_at_eos=False
        )
        assert content(client.post(CHATS, json=chat("why", document=name))) == expected.text
    assert client.delete(f"{DOCUMENTS}/{made[0]}").json()["deleted"]
    assert client.post(CHATS, json=chat("why", document=made[0])).status_code == 404
    for name in made[1:]:
        # Whichever replica holds it.
        assert client.get(f"{DOCUMENTS}/{name}").json()["tokens"] > 0
        assert client.get(f"{DOCUMENTS}/{name}/kept").json()["heads"] > 0


def test_no_request_hangs_when_a_replica_is_killed(client):
    """Each is answered, as alone, or refused with Retry-After; documents are there again with the next process."""
    documents = [
        client.post(DOCUMENTS, json={"text": lettered.DOC[:20]}).json()["id"] for _ in range(3)
    ]
    texts = [lettered.DOC[: 5 + at % 20] for at in range(40)]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        begun = time.monotonic()
        asked = [pool.submit(client.post, CHATS, json=chat(text, max_tokens=40)) for text in texts]
        asked += [
            pool.submit(client.post, CHATS, json=chat("why", document=name))
            for name in documents * 3
        ]
        time.sleep(0.3)
        process_of("replica-0").send_signal(signal.SIGKILL)
        found = [each.result(90) for each in asked]
        seconds = time.monotonic() - begun
    statuses = [each.status_code for each in found]
    print(f"{statuses.count(200)} answered, {statuses.count(503)} refused in {seconds:.1f} s")
    # Documents lie in both replicas: those of the other one are answered.
    assert set(statuses) <= {200, 503} and statuses.count(200) > len(texts) and seconds < 70
    assert all(each.headers.get("retry-after") for each in found if each.status_code == 503)
    expected = {text: alone(text, 40) for text in set(texts)}
    for text, each in zip(texts, found[: len(texts)], strict=True):
        assert content(each) == expected[text]
    ready(client)
    assert all(
        client.post(CHATS, json=chat("why", document=name)).status_code == 200 for name in documents
    )


def test_a_batch_is_answered_as_by_one_engine(cluster, folder, tmp_path):
    lines = [
        {"custom_id": f"r{at}", "url": CHATS, "body": chat(lettered.DOC[: 5 + at])}
        for at in range(12)
    ]
    lines += [
        {"custom_id": "drawn", "url": CHATS, "body": chat("abc", temperature=1)},
        {"custom_id": "odd"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}
    for way in ((), ("--ray", "--workers", "2")):
        out = tmp_path / f"out{len(way)}.jsonl"
        options = ["--model", str(folder), "--policy", "knorm", "--budget", "16", "--slots", "2"]
        options += ["--max-prompt-tokens", "64", "--max-new-tokens", "40"]
        assert cli.main(["batch", str(tmp_path / "in.jsonl"), "-o", str(out), *options, *way]) == 0
        found[way] = [json.loads(line) for line in out.read_text().splitlines()]
    one, other = found.values()
    assert [each["custom_id"] for each in one] == [each["custom_id"] for each in other]
    for a, b in zip(one, other, strict=True):
        assert a["error"] == b["error"] and a["id"] == b["id"]
        if a["response"] is not None:
            assert a["response"]["body"]["choices"] == b["response"]["body"]["choices"]


def test_arguments_that_cannot_be():
    for args, message in [
        ({"gpu": 1}, "there is no such argument"),
        ({"replicas": 0}, "start at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            app(args)
    with pytest.raises(ValueError, match="no such policy"):
        app({"policy": "nope"})
