"""`jaxkv fit-gate`: the gate that it writes is ridge regression's, and KVzap takes it."""

import numpy as np
import pytest
from cli_runs import refused
from safetensors.numpy import load_file

import jaxkv
from jaxkv import KVzap, cli
from jaxkv.analysis import fit_kvzap_gate, gate_fitting
from jaxkv.policies import KVzapGate
from jaxkv.policies.scorer import PromptReplay, ReplayWeighting

MODEL = "tiny-retrieval"
WORDS = "the grass is green and the sky is blue again here we go there and back"


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS.split(), 40)) for _ in range(2)]


def ridge(x, y, penalty):
    """Weights and biases [K, E], [K] of ridge regression: centred, the weights alone penalised."""
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    x, y = x - mean_x, y - mean_y
    weights = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
    return weights.T, mean_y - mean_x @ weights


def test_command_line_writes_the_gate(texts, tmp_path, capsys):
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    path = tmp_path / "gate.safetensors"
    assert (
        cli.main(["fit-gate", MODEL, *map(str, files), "--out", str(path), "--penalty", "0.5"]) == 0
    )
    assert f"gate of {MODEL} from" in capsys.readouterr().out
    params, tensors = jaxkv.load(MODEL), load_file(path)
    session, asked = jaxkv.Session(params), PromptReplay(sinks=0, weighting=ReplayWeighting.VALUES)
    layers = [
        gate_fitting._collect_regression_data(
            params, session.tokenize_prompts(params.text.encode(text, bos=True)), asked
        )
        for text in texts
    ]
    shares = []
    for layer in range(params.config.layers):
        x, y = (np.concatenate([each[layer][of] for each in layers]) for of in (0, 1))
        weight, bias = ridge(x, y, 0.5)
        np.testing.assert_allclose(tensors[f"layers.{layer}.weight"], weight, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(tensors[f"layers.{layer}.bias"], bias, rtol=1e-3, atol=1e-3)
        shares.append(
            1
            - ((y - x @ weight.T - bias) ** 2).sum(axis=0) / ((y - y.mean(axis=0)) ** 2).sum(axis=0)
        )
    fitted = fit_kvzap_gate(params, texts, penalty=0.5)
    np.testing.assert_allclose(fitted.explained, np.mean(shares, axis=1), atol=1e-3)
    assert fitted.gate.layers == params.config.layers and fitted.tokens == len(x)
    cache = jaxkv.prefill(params, texts[0], policy=KVzap(gate=str(path), budget=24, window=8))
    assert KVzapGate.load_from_file("gate", path) == cache.policy.gate
    assert (np.asarray(cache.length) == 24).all()


def test_what_it_refuses(texts, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(texts[0])
    assert "--out=" in refused(
        capsys, "fit-gate", MODEL, str(file), "--out", str(tmp_path / "none" / "gate")
    )
    shown = refused(capsys, "fit-gate", MODEL, str(file), "--out", str(file))
    assert "--out=" in shown and file.read_text() == texts[0]
    params = jaxkv.load(MODEL)
    with pytest.raises(ValueError, match=r"^penalty=0: use a number above 0"):
        fit_kvzap_gate(params, texts, penalty=0)
    with pytest.raises(ValueError, match=r"^texts=\[\]: use a list"):
        fit_kvzap_gate(params, [])
    with pytest.raises(ValueError, match=r"^texts='\d+ tokens': use a text of"):
        fit_kvzap_gate(params, [[5] * (params.config.max_positions + 1)])
