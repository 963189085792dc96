"""`jaxkv serve` as a process of its own: what it prints, answers, and does at SIGTERM; options that it rejects."""

import concurrent.futures
import logging
import re
import signal
import threading

import cli_runs
import httpx2
import lettered
import pytest
from cli_runs import refused
from serve_runs import launched, model_folder, started

import jaxkv
from jaxkv import cli
from jaxkv.cli import models, serving
from jaxkv.cli.serving import open_engines
from jaxkv.engine.slots import PARTS, Slots
from jaxkv.serving.server import open_listening_socket


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path)


def test_running_requests_are_answered_after_sigterm(folder):
    """A queue of streams when the signal comes: all are answered, a new request is rejected, and the process ends."""
    with started(folder, "--also", "full") as (process, address, lines):
        options = {"base_url": address, "timeout": 60, "trust_env": False}
        options["headers"] = {"Authorization": "Bearer sesame"}
        body = {"prompt": lettered.DOC, "temperature": 0, "max_tokens": 60, "ignore_eos": True}
        body["stream"] = True
        begun = threading.Event()
        with httpx2.Client(**options) as client, concurrent.futures.ThreadPoolExecutor(24) as pool:
            assert client.get("/health").status_code == 200
            listed = client.get("/v1/models").json()["data"]
            models = {each["id"]: each["budget"] for each in listed}
            assert models == {"tiny": 16, "tiny:full": None}
            assert httpx2.get(f"{address}/v1/models", trust_env=False).status_code == 401

            def ask(at):
                model = "tiny:full" if at % 4 == 3 else "tiny"
                sent = {**body, "model": model}
                with client.stream("POST", "/v1/completions", json=sent) as response:
                    begun.set()
                    return response.status_code, response.read().decode()

            answers = [pool.submit(ask, at) for at in range(24)]
            begun.wait(60)
            process.send_signal(signal.SIGTERM)
            late = 200
            while late == 200:
                asked = {**body, "stream": False}
                late = client.post("/v1/completions", json=asked).status_code
            assert late == 503 and client.get("/health").status_code == 503
            found = [answer.result(60) for answer in answers]
        taken = [text for status, text in found if status == 200]
        assert taken and {status for status, _ in found} <= {200, 503}
        assert all(
            text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
            for text in taken
        )
        assert process.wait(60) == 0
    log = "".join(lines)
    assert len(re.findall(r"POST /v1/completions 200 prompt_tokens=\d+ new_tokens=60", log)) >= len(
        taken
    )
    assert lettered.DOC[:9] not in log and "Traceback" not in log


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_starts_says_how_far_it_is_and_ends_at_a_signal(folder, sent):
    """Of a model that never ends to load: whatever is asked has 503, and one signal is enough."""
    endless = "import sys, time; from jaxkv import cli; from jaxkv.cli import serving; "
    endless += (
        "serving.ServeCommand.load_model = lambda self, **_: time.sleep(600); sys.exit(cli.main())"
    )
    with launched(folder, "--also", "full", program=("-c", endless)) as process:
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]
        assert f"1 of {1 + 2 * PARTS}: loading" in process.stderr.readline()
        with httpx2.Client(base_url=address, trust_env=False, timeout=60) as client:
            health = client.get("/health")
            asked = client.post("/v1/chat/completions", json={"messages": []})
            listed = client.get("/v1/models")
        for response in (health, asked, listed):
            assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
            error = response.json()["error"]
            assert (
                error["code"] == "starting" and error["type"] == "server_error" and error["message"]
            )
        told = health.json()
        assert told["status"] == "starting" and told["step"] == 1 and told["steps"] == 1 + 2 * PARTS
        process.send_signal(sent)
        assert process.wait(30) == 130
        assert "Traceback" not in process.stderr.read()


def test_a_busy_address_is_told_before_anything_is_loaded(capsys, monkeypatch):
    cli_runs.unloadable(monkeypatch)
    with open_listening_socket("127.0.0.1", 0) as first:
        port = str(first.getsockname()[1])
        said = refused(capsys, "serve", "--port", port)
    assert f"address='127.0.0.1:{port}'" in said and "use another --host or --port" in said


def test_further_policies_are_called_as_they_were_written():
    given = ("streamingllm --budget 9", "tova", "full")
    found = serving.parse_further_policies(given, jaxkv.KNorm(budget=16), "tiny")
    assert found == {
        "tiny:streamingllm-budget-9": jaxkv.StreamingLLM(budget=9),
        "tiny:tova": jaxkv.TOVA(budget=16),
        "tiny:full": jaxkv.FullKV(),
    }


def test_a_policy_that_cannot_be_is_told_before_anything_is_compiled(monkeypatch):
    """Also where it is a later one."""
    monkeypatch.setattr(Slots, "compile_programs", lambda *_, **__: pytest.fail("it was compiled"))
    policies = {
        "tiny": jaxkv.KNorm(budget=16),
        "tiny:omnikv": jaxkv.OmniKV(offload=True, filter_layers=(0,)),
    }
    limits = {"max_prompt_tokens": 60, "max_new_tokens": 60, "slots": 1}
    with (
        pytest.raises(ValueError, match="policy="),
        open_engines(lettered.tiny(), policies, folder=None, **limits),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slots", "many"], "--slots=many"),
        (["--port", "70000"], "--port=70000"),
        (["--api-key", "a b"], "without blanks"),
        (["--api-keys", "nothing.txt"], "--api-keys=nothing.txt"),
        (["--host", "256.0.0.1"], "use another --host or --port"),
        (
            ["--also", "full --window 3"],
            "--also='full --window 3': --window=3: full has no such option",
        ),
    ],
)
def test_options_that_cannot_be(capsys, options, said):
    assert said in refused(capsys, "serve", *options)


def test_models_without_a_tokenizer_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(models, "enable_compilation_cache", lambda: None)
    assert cli.main(["serve", "--model", str(lettered.FOLDER), "--port", "0"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("jaxkv: error: ") and "no tokenizer" in last


def test_a_line_of_log_is_there_once(capsys):
    """Also where another library gives the root logger a handler, as Orbax does when a document is saved."""
    log, other = logging.getLogger("jaxkv.serving"), logging.StreamHandler()
    logging.getLogger().addHandler(other)
    try:
        serving._send_logs_to_stderr()
        log.info("answered")
    finally:
        logging.getLogger().removeHandler(other)
        log.removeHandler(log.handlers[-1])
        log.setLevel(logging.NOTSET)
        log.propagate = True
    assert capsys.readouterr().err.count("answered") == 1
