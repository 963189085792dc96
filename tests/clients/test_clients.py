"""Public clients of the server: each script asks a small model for chats, streams, JSON of a schema and calls of tools.

They run in an environment of their own, `make test-clients`, as processes beside one server.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import agents
import pytest
import tiny
import uvicorn

import jaxkv
from jaxkv.loading import LanguageModel
from jaxkv.serving.http import HttpApplication

FOLDER = Path(__file__).parent
# Where `make test-clients` installs packages of npm: a script finds those beside it.
NPM = Path(sys.prefix) / "npm"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*_client.*"))


def spacious_model() -> LanguageModel:
    """A model of random weights: long prompts, a character a token, and no thoughts, whose length would be free."""
    small = agents.model("mistral")
    config = dataclasses.replace(small.config, max_positions=8192)
    return LanguageModel(tiny.tiny(config).decoder, text=agents.tokenizer("mistral"), name="tiny")


def save_tokenizer(folder: Path) -> None:
    """Write the model's tokenizer as transformers reads it, for a client that counts tokens itself."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(agents.tokenizer("mistral").tokenizer_json())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


@pytest.fixture(scope="module")
def address():
    """The address of a server's API."""
    limits = {"slots": 2, "max_prompt_tokens": 6000, "max_new_tokens": 400, "precompile": False}
    with jaxkv.Engine(spacious_model(), policy="knorm", **limits) as engine:
        settings = uvicorn.Config(HttpApplication({"tiny": engine}), port=0, log_level="error")
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            thread.join(0.05)
        try:
            (socket,) = server.servers[0].sockets
            yield f"http://127.0.0.1:{socket.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_client_gets_what_it_asks_for(script, address, tmp_path):
    """Scripts end with an error where an answer is not of the form that they asked for."""
    save_tokenizer(tmp_path / "tokenizer")
    command, path = [sys.executable], FOLDER / script
    if path.suffix == ".mjs":
        command, path = ["node"], Path(shutil.copy(path, NPM))
    clean = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    done = subprocess.run(
        [*command, str(path), address, "tiny"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**clean, "LLM_USER_PATH": str(tmp_path), "HF_DATASETS_OFFLINE": "1"},
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
