"""The transform under a model nobody here wrote: KerasHub's Llama, driven as the notebook drives it.

It runs in an environment of its own, `make test-foreign`.
"""

import json
import runpy

import jax.numpy as jnp
import notebook_outputs as outputs
import numpy as np
import oracles as o
import pytest

from jaxkv import AdaKV, FullKV, SnapKV

NOTEBOOK = outputs.FOLDER / "04_bring_your_own_model.ipynb"
WINDOW, NEW = 8, 12
ORACLES = {"snapkv": o.snapkv, "adakv": o.adakv}


def policy(name, budget):
    base = SnapKV(budget=budget, window=WINDOW)
    return AdaKV(base=base) if name == "adakv" else base


@pytest.fixture(scope="module")
def book():
    """The notebook's names after all of its cells ran, and its code cells with their outputs."""
    names, found = runpy.run_path(str(outputs.FOLDER / "run.py"))["ran"](
        json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    )
    cells = [
        cell | {"outputs": each}
        for cell, each in zip(outputs.code_cells(NOTEBOOK), found, strict=True)
    ]
    return names | {"cells": cells}


def test_the_notebook_gives_what_is_stored(book):
    assert not (found := outputs.differences(outputs.code_cells(NOTEBOOK), book["cells"])), (
        "\n".join(found)
    )


def test_the_notebook_says_what_it_shows(book):
    lines = "".join(
        outputs.text_of(each) for cell in book["cells"] for each in cell["outputs"]
    ).splitlines()
    assert [line for line in lines if "the same tokens" in line] == [
        f"{name} the same tokens: True" for name in ("FullKV", "SnapKV", "AdaKV")
    ]
    assert lines[-1] == "programs compiled for three pairs of lengths: 1"


@pytest.mark.parametrize(
    "make", [lambda n: FullKV(), lambda n: policy("snapkv", n), lambda n: policy("adakv", n)]
)
@pytest.mark.parametrize("lengths", [(64, 41), (23, 50)])
def test_a_budget_of_the_whole_prompt_draws_the_models_own_tokens(book, make, lengths):
    prompt = np.random.default_rng(len(lengths) + lengths[0]).integers(1, 97, (2, 64))
    ours, _ = book["generate"](prompt, jnp.asarray(lengths), make(64), NEW)
    theirs = np.stack([book["own"](prompt[row], n, NEW) for row, n in enumerate(lengths)])
    np.testing.assert_array_equal(ours, theirs)
    assert len(set(theirs.ravel().tolist())) > 4


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_a_quarter_keeps_the_rows_of_the_oracle(book, name):
    lengths = (64, 41)
    prompt = np.random.default_rng(7).integers(1, 97, (2, 64))
    _, rows = book["generate"](prompt, jnp.asarray(lengths), policy(name, 0.25), NEW)
    by_head = []
    for row, n in enumerate(lengths):
        qs, ks, vs = queries_keys_values(book, prompt[row, :n])
        kept, gap = ORACLES[name](qs, ks, 0.25, window=WINDOW)
        assert gap > 1e-6, "scores too near to one another for float32"
        for layer, held in enumerate(rows):
            for head in range(2):
                start, length = (
                    int(each[0, row, head]) for each in (held.segment_starts, held.length)
                )
                span = slice(start, start + length)
                assert (
                    np.asarray(held.get_layer_pool().pos)[row, span].tolist() == kept[layer][head]
                )
                np.testing.assert_allclose(
                    np.asarray(held.get_layer_pool().k)[row, span],
                    ks[layer][head][kept[layer][head]],
                    atol=1e-5,
                )
                np.testing.assert_allclose(
                    np.asarray(held.get_layer_pool().v)[row, span],
                    vs[layer][head][kept[layer][head]],
                    atol=1e-5,
                )
                by_head.append(length)
    assert (len(set(by_head)) > 2) == (name == "adakv")


def queries_keys_values(book, prompt):
    """One prompt's queries `[H, S, D]` of every layer, and KerasHub's own keys and values `[K, S, D]`."""
    model = book["model"]
    _, cache = model._build_cache(jnp.asarray(prompt)[None])
    qs, x = [], model.backbone.token_embedding(jnp.asarray(prompt)[None])
    for block in model.backbone.transformer_layers:
        q, _, _ = book["queries_keys_values"](block, x, jnp.arange(len(prompt))[None])
        qs.append(np.asarray(q[0]))
        x = block(x)
    keys, values = (np.moveaxis(np.asarray(cache)[0, :, index], 2, 1) for index in (0, 1))
    return qs, list(keys), list(values)


def test_one_compilation_serves_all_lengths(book):
    run, prompt = book["run"], np.random.default_rng(3).integers(1, 97, (2, 64))
    before = run._cache_size()
    for lengths in ((64, 40), (10, 30), (33, 64)):
        book["generate"](prompt, jnp.asarray(lengths), policy("snapkv", 20), NEW)
    assert run._cache_size() == before + 1
