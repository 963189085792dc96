"""The report's picture of one sample's text: which tokens each policy keeps, as caches after prefill have them."""

import json
import re

import eval_models
import numpy as np
import pytest
from evaluating import Words, words

import jaxkv
from jaxkv.evals import How, evaluate, kept, merge, runs
from jaxkv.evals.kept import Held
from jaxkv.testing import segments

POLICIES = {
    "full": jaxkv.FullKV(),
    "knorm@9": jaxkv.KNorm(budget=9),
    "h2o@9": jaxkv.H2O(budget=9),
    "omnikv": jaxkv.OmniKV(budget=8, filter_layers=(0,), adjacent=0),
}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Nothing is drawn: a picture takes longer than everything else here."""
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)


def ran(out, policies=POLICIES, agnostic=False, **options):
    evaluate(words(), Words(), policies, out, how=How(agnostic=agnostic), **{"batch": 3, **options})
    return (out / "kept.json").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "PLOTS_MISSING", True)
        out = tmp_path_factory.mktemp("evaluations") / "out"
        ran(out)
    return out


def counted(policy, ids):
    """Kv heads over all layers that hold each token after prefill."""
    found = np.zeros(len(ids), int)
    for segment in segments(jaxkv.Session(words(), policy).prefill([ids])):
        found[segment.pos] += 1
    return found.tolist()


@pytest.mark.parametrize("agnostic", [False, True])
def test_counts_are_those_of_the_cache_after_prefill(whole, tmp_path, agnostic):
    policies = {"knorm@9": POLICIES["knorm@9"]} if agnostic else POLICIES
    given = json.loads(
        ran(tmp_path / "out", policies, True) if agnostic else (whole / "kept.json").read_bytes()
    )
    sample = Words().samples(words())[0]
    ids = words().text.encode(sample.context + ("" if agnostic else sample.question), bos=True)
    assert (given["sample"], given["tokens"], given["heads"]) == (sample.id, len(ids), 4)
    assert "".join(given["pieces"]) == words().text.decode(ids) and len(given["pieces"]) == len(ids)
    assert list(given["policies"]) == list(policies)
    for name, row in given["policies"].items():
        expected = counted(policies[name], ids) if name.endswith("@9") else None
        assert row["counts"] == expected and row["between"] == 0, name
        assert (row["later"], row["chooses"], row["merges"]) == (
            name == "h2o@9",
            name == "omnikv",
            False,
        )


def test_a_run_that_is_cut_ends_with_the_same_bytes(whole, tmp_path):
    given, lines, out = (
        (whole / "kept.json").read_bytes(),
        (whole / "samples.jsonl").read_bytes(),
        tmp_path / "out",
    )
    ran(out, {"full": POLICIES["full"]})
    # More policies than before, and none of their lines; then a cut in the second one's first batch.
    assert ran(out) == given and (out / "samples.jsonl").read_bytes() == lines
    (out / "samples.jsonl").write_bytes(b"".join(lines.splitlines(keepends=True)[:8]))
    assert ran(out) == given and (out / "samples.jsonl").read_bytes() == lines
    parts = [tmp_path / f"part{at}" for at in range(2)]
    ran(parts[0], shard=(0, 2))
    evaluate(words(), Words(), POLICIES, parts[1], batch=3, shard=(1, 2))
    assert not (parts[1] / "kept.json").exists()
    merge(parts[::-1], tmp_path / "joined")
    assert (tmp_path / "joined" / "kept.json").read_bytes() == given


def test_the_page_shows_each_policys_tokens(whole):
    text = jaxkv.report(whole).read_text("utf-8")
    shown = kept.read_kept(whole)
    assert "full</b> drops nothing" in text
    assert (
        "omnikv</b> drops nothing: all kv heads hold all tokens, and it chooses for each new token"
        in text
    )
    assert text.count("While it answers it drops further rows") == 1
    parts = re.findall(r'<p class="kept" tabindex="0">(.*?)</p>', text, re.DOTALL)
    for part, name in zip(parts, ("knorm@9", "h2o@9"), strict=True):
        spans = re.findall(
            r'<(s|mark)( class="some")?[^>]* title="(\d) of 4 kv heads">([^<]*)</', part
        )
        assert "".join(each for *_, each in spans) == "".join(shown.pieces)
        counts = [int(count) for _, _, count, span in spans for _ in span.split()]
        assert counts == list(shown.policies[name].counts)
        # Not by colour alone.
        assert all((tag == "s") == (count == "0") for tag, _, count, _ in spans)
        assert all(bool(some) == (count in "123") for _, some, count, _ in spans)
    assert "keeps 40.9% of all rows" in text


def test_older_folders_have_no_such_picture(whole, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("run.json", "samples.jsonl", "kept.json"):
        (out / name).write_bytes((whole / name).read_bytes())
    some = json.loads((out / "kept.json").read_bytes())
    del some["policies"]["h2o@9"]
    (out / "kept.json").write_text(json.dumps(some))
    assert "<b>h2o@9</b> not recorded" in jaxkv.report(out).read_text("utf-8")
    for changed in (
        "{",
        "[]",
        json.dumps({**some, "heads": 3}),
        json.dumps({**some, "pieces": []}),
    ):
        (out / "kept.json").write_text(changed)
        with pytest.raises(ValueError, match=r"kept\.json.*the file was changed: remove it"):
            jaxkv.report(out)
    (out / "kept.json").unlink()
    assert "What was kept" not in jaxkv.report(out).read_text("utf-8")


def test_long_texts_lose_their_middle_and_say_so(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_EITHER_END", 2)
    text = eval_models.text()
    # A special token, one character of two tokens, markup.
    ids = text.encode("<s>ö<b>and more", bos=True)
    held = Held(
        ids=ids,
        heads=4,
        counts=[4, 1, 2, *[1] * (len(ids) - 6), 0, 0, 3],
        later=False,
        chooses=False,
        merges=True,
    )
    kept.add_kept(tmp_path, "few", "one", held, text)
    found = kept.read_kept(tmp_path)
    row = found.policies["few"]
    assert (
        found.tokens == len(ids) and found.left_out == len(ids) - 4 and row.counts == (4, 1, 0, 3)
    )
    assert row.between == sum(held.counts) - 8 and found.share(row) == sum(held.counts) / (
        4 * len(ids)
    )
    assert found.tally(row) == (1, 2, 1)
    monkeypatch.setattr(kept, "_EITHER_END", 4)
    (tmp_path / "more").mkdir()
    kept.add_kept(tmp_path / "more", "few", "one", held, text)
    begin, end = kept.read_kept(tmp_path / "more").passages(
        kept.read_kept(tmp_path / "more").policies["few"]
    )
    assert (
        begin == [("<s>", 4), ("ö", 1.5), ("<", 1)] and "".join(each.text for each in end) == "more"
    )


def test_counts_that_no_cache_gives_are_refused():
    for counts in ([1], [1, 5], [-1, 0]):
        with pytest.raises(ValueError, match="counts=.*from 0 to 4 for each of the 2 tokens"):
            Held(ids=[1, 2], heads=4, counts=counts)
    with pytest.raises(ValueError, match="ids=.*at least one token"):
        Held(ids=[], heads=4, counts=None)


def test_tasks_of_texts_have_it_too(tmp_path):
    (tmp_path / "one.txt").write_text("The mill stands by the river. " * 2)
    task = jaxkv.evals.OwnTexts(data=str(tmp_path), tokens=4, prefix=16)
    evaluate(eval_models.speaking(), task, {"few": jaxkv.KNorm(budget=9)}, tmp_path / "out")
    found = kept.read_kept(tmp_path / "out")
    assert (
        found.tokens == 16
        and sum(found.policies["few"].counts) == 9 * found.heads
        and "<s>The mill" in "".join(found.pieces)
    )
