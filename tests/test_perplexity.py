"""Loss of true tokens over compressed caches, token by token."""

import dataclasses
import json
import math

import eval_models
import numpy as np
import pytest
import running
import tiny

import jaxkv
from jaxkv.evals import TASKS, How
from jaxkv.evals.perplexity import TextLossTask, measure_text_losses
from jaxkv.evals.texts import read_texts

TEXT = "The river ran past the mill, and Ada counted the boats that came up it. " * 3


def written(tmp_path, *texts):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    return str(tmp_path)


def test_loss_is_that_of_one_long_prompt():
    model = tiny.tiny(tiny.MODELS["gqa3"])
    ids = np.asarray(tiny.prompts(0, (40, 40)), np.int32)
    found, before, after, nbytes = measure_text_losses(
        model, jaxkv.FullKV(), ids[:, :32].tolist(), ids[:, 32:]
    )
    prefixes = [row[:end].tolist() for row in ids for end in range(32, 40)]
    _, logits = running.prefill(model, prefixes)
    logits = logits.astype(np.float64).reshape(2, 8, -1)
    gathered = np.take_along_axis(logits, ids[:, 32:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, np.log(np.exp(logits).sum(axis=-1)) - gathered, atol=1e-4)
    assert before.tolist() == [32, 32] and after.tolist() == [39, 39]
    # Of three layers and two heads, keys and values of eight numbers.
    assert nbytes.tolist() == [39 * 3 * 2 * 2 * 8 * 4] * 2


@pytest.mark.parametrize(
    "policy, rows",
    [
        (jaxkv.TOVA(budget=48), (32, 39)),
        (jaxkv.SnapKV(budget=16, window=4), (16, 23)),
        (jaxkv.SnapKV(budget=16, window=4, every=4), (16, 19)),
    ],
    ids=repr,
)
def test_rows_stay_within_the_budget_where_the_policy_sees_to_it(policy, rows):
    model = tiny.tiny(tiny.TWO_LAYERS)
    ids = np.asarray(tiny.prompts(1, (40, 40)), np.int32)
    found, before, after, _ = measure_text_losses(model, policy, ids[:, :32].tolist(), ids[:, 32:])
    assert np.isfinite(found).all() and before.tolist() == [rows[0]] * 2
    assert after.tolist() == [rows[1]] * 2


def test_the_curve_is_of_all_tokens(tmp_path):
    task = TextLossTask(data=written(tmp_path, TEXT, TEXT[9:]), prefix=20, tokens=131)
    model = eval_models.speaking()
    samples = task.samples(model)
    assert (
        [sample.tags["title"] for sample in samples] == ["0", "1"]
        and not task.asks
        and not task.higher
    )
    outcomes = task.run(model, jaxkv.H2O(budget=16), samples, How())
    for outcome in outcomes:
        figures = outcome.figures
        # A vocabulary of 260: chance is 5.56 nats, and the random model is surer and so worse.
        whole = np.average(figures["losses"], weights=[2] * 65 + [1])
        assert outcome.score == pytest.approx(whole, abs=1e-9) and outcome.score > math.log(100)
        assert figures["positions"] == [*range(2, 131, 2), 131] and len(figures["losses"]) == 66
        assert figures["rows_after_prefill"] == outcome.rows == 16 and outcome.tokens == 151
    assert outcomes[0].score != outcomes[1].score


def test_texts_come_from_wherever(tmp_path):
    shipped = read_texts(None)
    assert len(shipped) == 8 and list(read_texts(None, 2)) == list(shipped)[:2]
    assert all(len(text) > 15_000 for text in shipped.values())
    folder = written(tmp_path, "a", "b")
    assert read_texts(folder) == {"0": "a", "1": "b"} and read_texts(f"{folder}/1.txt") == {
        "1": "b"
    }
    lines = tmp_path / "books.jsonl"
    lines.write_text(
        "\n".join(json.dumps(row) for row in ({"text": "a", "title": "A"}, {"text": "b"}))
    )
    assert read_texts(str(lines)) == {"000 A": "a", "001": "b"}


def test_texts_of_unequal_lengths_are_what_they_are_alone(tmp_path):
    texts = ["The river ran past the mill. " * 2, "Ada counted the boats that came up it. " * 2]
    model, policy = eval_models.speaking(), jaxkv.SnapKV(budget=24, window=4)
    task = TextLossTask(data=written(tmp_path, *texts), prefix=70, tokens=8)
    samples = task.samples(model)
    assert [each.tags["title"] for each in samples] == ["1", "0"] and TASKS["loss"] is TextLossTask
    together = task.run(model, policy, samples, How())
    alone = [task.run(model, policy, [each], How())[0] for each in samples]
    assert [each.tokens for each in together] == [each.tokens for each in alone] == [78, 59]
    for one, other in zip(together, alone, strict=True):
        assert one.figures["positions"] == [*range(1, 9)] and one.rows == other.rows
        np.testing.assert_allclose(one.figures["losses"], other.figures["losses"], atol=1e-4)
    for tokens in (30, 300):
        with pytest.raises(ValueError, match="^tokens="):
            dataclasses.replace(task, tokens=tokens).samples(model)
    with pytest.raises(ValueError, match="^params="):
        task.samples(tiny.tiny(tiny.TWO_LAYERS))
