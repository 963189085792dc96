"""A local Ray cluster: two replicas answer as `generate` does, each knows all documents, one is killed.

It runs in an environment of its own, `make test-ray`.
"""

import concurrent.futures
import json
import os
import signal
import time
from pathlib import Path

import httpx2
import lettered
import psutil
import pytest
import ray
from ray import serve
from serve_runs import model_folder

import jaxkv
from jaxkv import cli
from jaxkv.serving.ray import RayServeSettings, app

ROOT = Path(__file__).parent.parent.parent
PORT = 18437
CHATS, DOCUMENTS = "/v1/chat/completions", "/v1/documents"
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
POLICY = jaxkv.KNorm(budget=16)
SIZES = {"slots": 2, "max_prompt_tokens": 64, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("ray"))


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
    serve.run(app(RayServeSettings(**args, **SIZES, **more)))
    with httpx2.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=90, trust_env=False) as client:
        yield client


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **GREEDY, **more}


def alone(text, new=9):
    options = {"policy": POLICY, "max_new_tokens": new, "stop_at_eos": False}
    return jaxkv.generate(lettered.tiny(), [{"role": "user", "content": text}], **options).text


def content(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def replicas():
    """The processes of the replicas."""
    every = psutil.process_iter(["cmdline"])
    return [each for each in every if "ServeReplica:default:Replica" in str(each.info)]


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
    """Each is answered, as alone, or has an error of the server's; asked again, it is answered."""
    document = client.post(DOCUMENTS, json={"text": lettered.DOC[:20]}).json()["id"]
    texts = [lettered.DOC[: 5 + at % 20] for at in range(40)]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(client.post, CHATS, json=chat(text, max_tokens=40)) for text in texts]
        time.sleep(0.3)
        replicas()[0].send_signal(signal.SIGKILL)
        found = [each.result(90) for each in asked]
    statuses = [each.status_code for each in found]
    print(f"{statuses.count(200)} answered, of {len(texts)}")
    assert set(statuses) <= {200, 500, 503} and 200 in statuses
    expected = {text: alone(text, 40) for text in set(texts)}
    for text, each in zip(texts, found, strict=True):
        if each.status_code != 200:
            each = client.post(CHATS, json=chat(text, max_tokens=40))
        assert content(each) == expected[text]
    for _ in range(120):
        if len(replicas()) == 2:
            break
        time.sleep(0.5)
    for _ in range(8):
        assert client.post(CHATS, json=chat("why", document=document)).status_code == 200


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
    for args in ({"gpu": 1}, {"replicas": 0}, {"policy": "nope"}):
        with pytest.raises(ValueError, match=next(iter(args))):
            app(RayServeSettings(**args))
