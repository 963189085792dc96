"""An evaluation as numbers, pictures and a page: all of it is there, and what a model has said stays text."""

import base64
import dataclasses
import html.parser
import json

import eval_models
import numpy as np
import pytest
from evaluating import POLICIES, Told, Words, told, words

import jaxkv
from jaxkv.evals import (
    Evaluation,
    compute_confidence_interval,
    evaluate,
    html_report,
    pictures,
    runs,
    token_shading,
)
from jaxkv.testing import segments

HOSTILE = "</td></script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp; $x^{$ \x00\x1b \u202e"
PICTURES = {"scores", "bytes", "lengths", "map", "curve_losses"}
ROWS = {**POLICIES, "knorm@12": jaxkv.KNorm(budget=12), "<b>|$\\frac$": jaxkv.KNorm(budget=9)}


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: its elements with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Sampled once: a line for each policy, a map, a curve."""
    path = tmp_path_factory.mktemp("evaluations") / "out"
    told(path, Told(hostile=HOSTILE), policies=ROWS)
    return path


@pytest.fixture
def plain(monkeypatch):
    for module in (runs, html_report):
        monkeypatch.setattr(module, "PLOTS_MISSING", True)


def test_intervals():
    # Newcombe 1998, table I, method 3.
    for hits, n, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0, 0.1611)):
        found = compute_confidence_interval((np.arange(n) < hits).astype(float))
        assert np.allclose(found, (low, high), atol=6e-5)
    # Student's, of 4 numbers: 3.182 standard errors; as far as shares go.
    values = np.asarray([0.25, 0.5, 0.75, 1.0])
    width = 3.182446 * np.std(values, ddof=1) / 2
    assert np.allclose(compute_confidence_interval(values, None), (0.625 - width, 0.625 + width))
    assert compute_confidence_interval(values)[1] == 1.0
    assert compute_confidence_interval(np.asarray([0.3]), None) is None
    # Five alike are not known for sure: others may differ, up to 43% of all (Wilson).
    assert compute_confidence_interval(np.full(5, 0.5)) == pytest.approx((0.2828, 0.7172), abs=1e-4)


def test_cells_and_differences(out):
    found = Evaluation.read(out)
    assert found.policy_names == tuple(ROWS) and found.distinct_prompt_lengths == (10, 20, 30)
    a, b, mean = (found.cell("full", group) for group in (*found.group_names, None))
    assert (a.n, mean.n, mean.mean) == (7, 14, (a.mean + b.mean) / 2)
    # Two groups of one size: half the interval's ends in quadrature.
    assert mean.low == pytest.approx(mean.mean - np.hypot(a.mean - a.low, b.mean - b.low) / 2)
    assert mean.high == pytest.approx(mean.mean + np.hypot(a.high - a.mean, b.high - b.mean) / 2)
    assert mean.rows == pytest.approx(
        np.mean([record.rows for record in found.select_records("full")])
    )
    apart = found.scores("full") - found.scores("knorm@9")
    said = found.difference("full", "knorm@9")
    assert (said.above, said.below, said.n) == ((apart > 0).sum(), (apart < 0).sum(), 14)
    assert said.mean == pytest.approx(apart.mean()) and said.low < said.mean < said.high
    # None of seven, twice, that differ may be up to 35% of all (Wilson), each by as much as shares can.
    alike = found.difference("full", "full")
    assert (alike.low, alike.high) == pytest.approx((-0.2507, 0.2507), abs=1e-3)
    short = found.cell("full", length=10)
    assert short.n == 6 == len(found.select_records("full", length=10))
    for wrong in ({"policy": "adakv"}, {"group": "c"}, {"length": 11}):
        with pytest.raises(ValueError, match="^(policy|group)="):
            found.cell(**{"policy": "full", **wrong})
    assert json.loads(json.dumps(found.as_dict()))["cells"][2]["group"] == "mean"


def test_groups_of_a_difference_have_the_weight_that_they_have_in_a_cell(out):
    whole = Evaluation.read(out)
    # Seven samples of one group, and two of the other, of which one policy lacks one.
    kept = [r for r in whole.records if r.group == whole.group_names[0] or r.id in ("10", "11")]
    found = dataclasses.replace(whole, records=tuple(kept))
    said, *parts = (
        found.difference("full", "knorm@9", group) for group in (None, *whole.group_names)
    )
    assert [part.n for part in parts] == [7, 2] and said.n == 9
    assert said.mean == pytest.approx((parts[0].mean + parts[1].mean) / 2)


def test_the_table_is_markdown_whatever_the_names(out):
    found = Evaluation.read(out)
    text, mean = found.table(), found.cell("full")
    assert (out / "table.md").read_text() == text + "\n"
    line = f"| full | {100 * mean.mean:.1f} | {100 * mean.low:.1f} to {100 * mean.high:.1f} | 14 | {mean.rows:.1f} |"
    assert line in text and "| <b>\\|$\\frac$ |" in text
    assert all(line.startswith(("|", "#")) or not line for line in text.splitlines())


def test_notes(out):
    evaluation = Evaluation.read(out)
    assert evaluation.result_warnings == []
    zeroed = [
        dataclasses.replace(r, score=r.score * (r.policy != "full")) for r in evaluation.records
    ]
    (note,) = dataclasses.replace(evaluation, records=tuple(zeroed)).result_warnings
    assert "scored 0" in note
    (note,) = dataclasses.replace(evaluation, records=evaluation.records[:-1]).result_warnings
    assert "Not finished" in note and [*ROWS][-1] in note


def test_pictures_lie_beside_the_lines(out):
    there = {each.name for each in out.iterdir() if not each.name.startswith(".")} - {"report.html"}
    drawn = {f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png")}
    assert there == {"results.jsonl", "table.md"} | drawn


def test_pictures_have_what_they_are_of(out):
    evaluation = Evaluation.read(out)
    panels = {
        axes.get_title().partition(":")[0]: axes
        for axes in pictures._plot_depth_maps(evaluation).axes
    }
    shown = panels["knorm@9"].images[0].get_array()
    mine = [
        r
        for r in evaluation.select_records("knorm@9")
        if (r.tags["depth"], r.tags["length"]) == (1, 20)
    ]
    assert shown.shape == (2, 3) and set(ROWS) <= set(panels)
    assert shown[1, 1] == pytest.approx(100 * sum(r.score for r in mine) / len(mine))
    (axes,) = pictures._plot_scores(evaluation).axes
    bars = {each.get_label(): each for each in axes.containers}
    cells = [evaluation.cell(f"knorm@{n}") for n in (9, 12)]
    line, _, (segments,) = bars["knorm"].lines
    np.testing.assert_allclose(
        line.get_xydata(), [[9, 100 * cells[0].mean], [12, 100 * cells[1].mean]]
    )
    ends = [[100 * cell.low, 100 * cell.high] for cell in cells]
    np.testing.assert_allclose(np.asarray(segments.get_segments())[:, :, 1], ends)
    assert axes.lines[0].get_label() == "full"
    entry_counts = pictures._plot_scores_by_length(evaluation).axes[0].lines[0].get_xydata()
    means = [[n, 100 * evaluation.cell("full", length=n).mean] for n in (10, 20, 30)]
    np.testing.assert_allclose(entry_counts, means)


def test_the_page_has_it_all_and_runs_nothing_of_it(out, tmp_path):
    path = jaxkv.evals.report(out, samples=2, out=tmp_path / "page.html")
    seen = Page(path.read_text("utf-8"))
    assert path == tmp_path / "page.html"
    tags = {tag for tag, _ in seen.elements}
    assert tags.isdisjoint({"script", "i", "b>", "iframe", "link", "object"})
    sources = [given["src"] for _, given in seen.elements if "src" in given]
    # The same numbers are the same bytes.
    drawn = {(out / f"{name}.svg").read_bytes() for name in PICTURES}
    kind = "data:image/svg+xml;base64,"
    assert {base64.b64decode(each.removeprefix(kind)) for each in sources} == drawn
    assert not [name for _, given in seen.elements for name in given if name.startswith("on")]
    assert "<script>alert(1)</script>" in seen.text and "\\x00\\x1b \\u202e" in seen.text
    assert seen.text.count("the first 2 of 14 samples") == len(ROWS)
    assert all(
        text in seen.text for text in (*ROWS, *Evaluation.read(out).group_names, "KNorm(budget=12")
    )


def test_a_page_of_several_folders_and_of_what_is_not_finished(tmp_path, plain):
    parts = [tmp_path / f"{at}" for at in range(2)]
    for at, part in enumerate(parts):
        told(part, shard=(at, 2))
    one, both = (jaxkv.evals.report(*parts[:n]).read_text("utf-8") for n in (1, 2))
    assert "Not finished" in one and "Not finished" not in both and "<img" not in both
    for folder in (tmp_path, tmp_path / "none", parts[0] / "results.jsonl"):
        with pytest.raises(ValueError, match="^folder="):
            jaxkv.evals.report(folder)


# --- which tokens of one text are kept --------------------------------------------------------------------------------


def test_counts_are_those_of_the_cache_after_prefill(tmp_path, plain):
    policies = {
        "knorm@9": jaxkv.KNorm(budget=9),
        "h2o@9": jaxkv.H2O(budget=9),
        "omnikv": jaxkv.OmniKV(budget=8, filter_layers=(0,), adjacent=0),
    }
    found = evaluate(words(), Words(), policies, tmp_path / "out", batch=3)
    sample = Words().samples(words())[0]
    ids = words().text.encode(sample.context + sample.question, bos=True)
    for name, policy in policies.items():
        first, *others = found.select_records(name)
        assert not [record for record in others if record.held]
        held = first.held
        assert (held["later"], held["chooses"]) == (name == "h2o@9", name == "omnikv")
        if name == "omnikv":
            assert held["share"] is None
            continue
        counts = np.zeros(len(ids), int)
        for segment in segments(jaxkv.Session(words(), policy).prefill([ids])):
            counts[segment.pos] += 1
        ((pieces, said),) = held["ends"]
        assert said == counts.tolist() and "".join(pieces) == words().text.decode(ids)
        assert held["share"] == counts.sum() / (4 * len(ids))
    text = jaxkv.evals.report(tmp_path / "out").read_text("utf-8")
    assert text.count("evicts nothing") == 1 and text.count("<mark") > 8
    assert text.count("while it answers it evicts further entries") == 1


def test_long_texts_lose_their_middle_and_say_so(monkeypatch):
    monkeypatch.setattr(token_shading, "_EITHER_END", 4)
    text = eval_models.text()
    # A special token, one character of two tokens, markup.
    ids = text.encode("<s>ö<b>and more", bos=True)
    counts = [4, 1, 2, *[1] * (len(ids) - 6), 0, 0, 3]
    ends = token_shading.select_prompt_ends(ids, counts, text)
    begin, end = html_report.shade_kept_tokens({"ends": ends, "heads": 4}).passages
    assert begin == [("<s>", 4), ("ö", 1.5), ("<", 1)]
    assert "".join(each.text for each in end) == "more"


def test_tasks_of_texts_have_it_too(tmp_path, plain):
    (tmp_path / "one.txt").write_text("The mill stands by the river. " * 2)
    task = jaxkv.evals.TextLossTask(data=str(tmp_path), tokens=4, prefix=16)
    found = evaluate(eval_models.speaking(), task, {"few": jaxkv.KNorm(budget=9)}, tmp_path / "out")
    ((pieces, counts),) = found.records[0].held["ends"]
    assert sum(counts) == 9 * found.records[0].held["heads"] and "<s>The mill" in "".join(pieces)


def test_a_curve_ends_at_the_mean_of_all_positions(out):
    given, figures = Evaluation.read(out), {"losses": [1.0, 2.0, 6.0], "positions": [12, 14, 15]}
    records = tuple(dataclasses.replace(each, figures=figures) for each in given.records)
    found = dataclasses.replace(given, records=records)
    line = pictures._plot_curve(found, name="losses").axes[0].lines[2]
    assert line.get_xydata().tolist() == [[12, 1.0], [14, 1.5], [15, 12 / 5]]
