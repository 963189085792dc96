"""Settings of sampling of a `generation_config.json`: on demand in Python, by default in the server."""

import json

import lettered
import meshes
import pytest
import serve_runs
from starlette.testclient import TestClient

import jaxkv
from jaxkv.checkpoints import convert
from jaxkv.engine.sampling import GREEDY, Sampling
from jaxkv.loading import LanguageModel
from jaxkv.serving.http import HttpApplication
from jaxkv.serving.limits import RequestLimits

GIVEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
OTHERS = {"max_length": 20, "bos_token_id": 1, "transformers_version": "5", "min_p": None}


@pytest.fixture
def folder(tmp_path):
    return serve_runs.model_folder(tmp_path)


def write(folder, settings):
    (folder / "generation_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, Sampling()),
        ({}, Sampling()),
        (OTHERS, Sampling()),
        ({**GIVEN, **OTHERS, "do_sample": True}, Sampling(**GIVEN)),
        ({**GIVEN, "do_sample": False}, Sampling(**{**GIVEN, "temperature": 0})),
        ({"do_sample": False}, GREEDY),
        ({"min_p": 0.1, "top_k": 0}, Sampling(min_p=0.1)),
    ],
)
def test_settings_of_a_folder(folder, settings, expected):
    if settings is not None:
        write(folder, settings)
    assert Sampling.of(jaxkv.load(folder)) == expected


def test_settings_survive_a_conversion_and_a_mesh(folder, tmp_path):
    write(folder, GIVEN | {"eos_token_id": 7})
    params = jaxkv.load(convert(folder, tmp_path / "converted"))
    assert Sampling.of(params) == Sampling(**GIVEN) and 7 in params.end_token_ids
    assert Sampling.of(params.on(meshes.mesh_of(2, 1))) == Sampling(**GIVEN)


def test_unfit_settings_are_named(folder):
    write(folder, {"temperature": "hot"})
    params = jaxkv.load(folder)
    with pytest.raises((TypeError, ValueError), match="temperature="):
        Sampling.of(params)


def test_the_server_takes_what_a_request_leaves_out(folder):
    plain = lettered.tiny()
    params = LanguageModel(plain.decoder, text=plain.text, name="tiny", generation=GIVEN)
    options = {"slots": 2, "max_prompt_tokens": 64, "max_new_tokens": 20}
    with jaxkv.Engine(params, **options) as engine:

        def answered(body, **limits):
            limits = RequestLimits(**limits)
            client = TestClient(HttpApplication({"tiny": engine}, limits=limits))
            sent = {"prompt": lettered.DOC, "ignore_eos": True, "seed": 3} | body
            return client.post("/v1/completions", json=sent).json()["choices"][0]["text"]

        def alone(**fields):
            how = {"sampling": Sampling(**fields), "max_new_tokens": 16, "stop_at_eos": False}
            return jaxkv.generate(params, lettered.DOC, raw=True, key=3, **how).text

        assert answered({}) == alone(**GIVEN)
        assert answered({"top_k": 3, "temperature": 1.5}) == alone(
            **GIVEN | {"top_k": 3, "temperature": 1.5}
        )
        assert answered({"temperature": 0}) == alone(**GIVEN | {"temperature": 0})
        assert answered({}, generation_config="none") == alone()
        params.generation = {"do_sample": False}
        assert answered({"seed": None}) == answered({"seed": 4}) == alone(temperature=0)
    with pytest.raises(
        ValueError, match="generation_config='file': unknown: use one of auto, none"
    ):
        RequestLimits(generation_config="file")
