"""The tiny model that comes with jaxkv: what it is, that it finds what it is asked for, and orders between policies."""

import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
import tokenizers
from safetensors.numpy import load_file

import jaxkv
from jaxkv.checkpoints import get_manifest
from jaxkv.evals import How, Ruler, TwoStage
from jaxkv.evals.needle import Needle

# As `python -m` in the checkout finds them.
sys.path.append(str(Path(__file__).parent.parent))
orders_tiny, train_tiny, export, lessons, model = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("orders_tiny", "train_tiny", "tiny.export", "tiny.lessons", "tiny.model")
)
LENGTH = 512
COUNT = 12


@functools.cache
def tiny():
    return jaxkv.load("tiny-retrieval", dtype="float32")


@functools.cache
def mean(task, policy, agnostic=False):
    return float(np.mean(orders_tiny.scores(tiny(), policy, task, How(agnostic=agnostic))))


def ruler(name):
    return Ruler(tasks=(name,), lengths=(LENGTH,), wording="small", count=COUNT)


def test_it_is_small_and_comes_with_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "none"))
    known = get_manifest("tiny-retrieval")
    assert known.source.bytes < 4e6 and known.license == "Apache-2.0"
    config = jaxkv.load("tiny-retrieval").config
    assert (config.kv_heads, config.group_size, config.head_dim, config.max_positions) == (
        4,
        2,
        32,
        2048,
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", sorted(lessons.LESSONS))
def test_its_tokenizer_gives_texts_back(name):
    rng, text = np.random.default_rng(3), tiny().text
    for _ in range(2):
        context, asked = lessons.LESSONS[name](rng, 200)
        question, answer = next(asked)
        ids = text.encode(context + question + answer, bos=False)
        assert text.decode(ids) == context + question + answer
        # Cut between a question and its answer, as samples are, the tokens are the same.
        assert ids == sum(
            (text.encode(part, bos=False) for part in (context, question, answer)), []
        )


def test_the_network_that_was_trained_gives_its_logits():
    config, weights = tiny().config, load_file(export.FOLDER / "model.safetensors")
    shape = model.Shape(vocab=config.vocab)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 900, length).tolist() for length in (9, 60)]
    _, logits = running.prefill(tiny(), rows)
    wide = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    for row, found in zip(rows, logits, strict=True):
        states = model.hidden_states(wide, jnp.asarray([row], jnp.int32), shape)
        assert running.gap(found, np.asarray(model.logits(wide, states)[0, -1])) < 1e-4


def test_steps_lower_the_loss():
    tokenizer = tiny().text.tokenizer_json()
    assert tokenizer is not None
    stage = train_tiny.Stage(length=64, batch=4, mix={"pairs": 1})
    shape = model.Shape(vocab=tiny().config.vocab, embed=128, layers=2)
    weights = model.initial(shape, 0)
    with jax.numpy_dtype_promotion("standard"):
        state = train_tiny.optimiser().init(weights)
    texts = train_tiny.texts_of(
        np.random.default_rng(0), tokenizers.Tokenizer.from_str(tokenizer), stage
    )
    asked = train_tiny.asked_of(texts, 96)
    losses = []
    # Optax adds integers to floats.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(8):
            weights, state, loss, right = train_tiny.step(
                weights, state, texts.tokens[:, :-1], asked, np.float32(0.5), shape
            )
            losses.append(float(loss))
    assert losses[-1] < losses[0] - 1
    assert jax.tree.all(jax.tree.map(lambda each: bool(jnp.isfinite(each).all()), weights))
    shares = train_tiny.accuracy(texts, np.asarray(right), ["pairs"])
    assert 0 <= shares["pairs"][0] <= shares["pairs"][1] > 0


@pytest.mark.parametrize("name", ["niah_multiquery", "vt"])
def test_the_full_cache_answers(name):
    assert mean(ruler(name), jaxkv.FullKV()) >= 0.9


def stages():
    return TwoStage(count=COUNT, sizes=(10, 20), reason=True, new_tokens=24)


def test_the_full_cache_looks_sums_up():
    assert mean(stages(), jaxkv.FullKV()) >= 0.9


def test_heads_with_budgets_of_their_own_lose_less_where_the_question_is_unseen():
    task = ruler("niah_multikey_1")
    assert mean(task, jaxkv.AdaKV(budget=64), True) >= mean(task, jaxkv.SnapKV(budget=64), True)


def test_choosing_anew_beats_dropping_where_a_sum_decides():
    assert mean(stages(), jaxkv.OmniKV(budget=0.3)) > mean(stages(), jaxkv.H2O(budget=0.3)) + 0.2


def test_the_newest_tokens_do_not_hold_what_stands_in_the_middle():
    task = Needle(lengths=(LENGTH,), depths=(0.3, 0.6), wording="small", count=COUNT // 2)
    assert (
        mean(task, jaxkv.StreamingLLM(budget=128))
        <= 0.1
        < 0.6
        <= mean(task, jaxkv.SnapKV(budget=128))
    )


def test_a_quarter_of_the_cache_finds_needles_though_the_question_comes_later():
    """The policy and the budget of the README's document that is asked many questions."""
    task = Needle(lengths=(LENGTH,), depths=(0.3, 0.6), wording="small", count=COUNT // 2)
    whole, quarter = (
        mean(task, policy, True) for policy in (jaxkv.FullKV(), jaxkv.KVzip(budget=0.25))
    )
    assert quarter >= whole - 0.1 and whole > 0.8


def test_merging_loses_no_more_than_dropping():
    assert mean(ruler("niah_multikey_1"), jaxkv.D2O(budget=64)) >= mean(
        ruler("niah_multikey_1"), jaxkv.H2O(budget=64)
    )
