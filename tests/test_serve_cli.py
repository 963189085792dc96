"""`jaxkv serve` as a process of its own: what it prints, answers, and does at SIGTERM; options that it refuses."""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import lettered
import pytest
from cli_runs import refused

ROOT = Path(__file__).parent.parent
QUICK = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@pytest.fixture
def folder(tmp_path):
    """A model's folder with a tokenizer of characters."""
    folder = tmp_path / "model"
    shutil.copytree(lettered.FOLDER, folder, copy_function=shutil.copyfile)
    (folder / "tokenizer.json").write_text(lettered.characters().tokenizer_json())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": lettered.TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextlib.contextmanager
def started(folder, *options):
    """A server's process, its address, and a list of its lines on stderr, complete once the process has ended."""
    limits = ["--slots", "1", "--max-prompt-tokens", "60", "--max-new-tokens", "60", "--max-question-tokens", "0"]
    command = [sys.executable, "-m", "jaxkv", "serve", "--model", str(folder), "--served-model-name", "tiny"]
    command += ["--policy", "knorm", "--budget", "16", "--port", "0", *limits, *options]
    environment = {**os.environ, "JAXKV_CACHE": str(folder.parent), "XLA_FLAGS": QUICK, "JAXKV_API_KEY": "sesame"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    lines, address = [], None
    with process.stderr:
        while address is None:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
            address = re.search(r"at (http://127\.0\.0\.1:\d+)/v1, 1 slots", lines[-1])
        reader = threading.Thread(target=lines.extend, args=(process.stderr,))
        reader.start()
        try:
            yield process, address[1], lines
        finally:
            process.kill()
            process.wait()
            reader.join()


def test_running_requests_are_answered_after_sigterm(folder):
    """A queue of streams when the signal comes: all are answered, a new request is refused, and the process ends."""
    with started(folder) as (process, address, lines):
        options = {
            "base_url": address,
            "headers": {"Authorization": "Bearer sesame"},
            "timeout": 60,
            "trust_env": False,
        }
        body = {"prompt": lettered.DOC, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "stream": True}
        begun = threading.Event()
        with httpx2.Client(**options) as client, concurrent.futures.ThreadPoolExecutor(24) as pool:
            assert (
                client.get("/health").status_code == 200 and client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            )
            assert httpx2.get(f"{address}/v1/models", trust_env=False).status_code == 401

            def ask(_):
                with client.stream("POST", "/v1/completions", json=body) as response:
                    begun.set()
                    return response.status_code, response.read().decode()

            answers = [pool.submit(ask, at) for at in range(24)]
            begun.wait(60)
            process.send_signal(signal.SIGTERM)
            late = {"status": 200}
            while late["status"] == 200:
                late = {"status": client.post("/v1/completions", json={**body, "stream": False}).status_code}
            assert late["status"] == 503 and client.get("/health").status_code == 503
            found = [answer.result(60) for answer in answers]
        taken = [text for status, text in found if status == 200]
        assert taken and {status for status, _ in found} <= {200, 503}
        assert all(text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text for text in taken)
        assert process.wait(60) == 0
    log = "".join(lines)
    assert len(re.findall(r"POST /v1/completions 200 prompt_tokens=\d+ new_tokens=60", log)) >= len(taken)
    assert lettered.DOC[:9] not in log and "Traceback" not in log


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slots", "many"], "--slots=many: give a whole number, or auto"),
        (["--port", "70000"], "give at most 65535"),
        (["--timeout", "0"], "--timeout=0.0: give seconds above 0"),
        (["--api-key", "a b"], "without blanks"),
        (["--host", "256.0.0.1"], "give another --host or --port"),
        (["--policy", "full", "--budget", "4"], "full has no such option"),
        (["--max-body-bytes", "0"], "give at least 1"),
    ],
)
def test_options_that_cannot_be(capsys, options, said):
    assert said in refused(capsys, "serve", *options)


def test_models_without_a_tokenizer_are_refused(capsys, monkeypatch):
    from jaxkv.cli import serving

    monkeypatch.setattr(serving, "enable_compilation_cache", lambda: None)
    assert "no tokenizer" in refused(capsys, "serve", "--model", str(lettered.FOLDER), "--port", "0")
