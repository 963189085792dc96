"""A finished evaluation as numbers, pictures and a page: all of it is there, and what a model has said stays text."""

import base64
import dataclasses
import hashlib
import html.parser
import itertools
import json

import numpy as np
import pytest
from evaluating import POLICIES, Told, Words, told

import jaxkv
from jaxkv.evals import Evaluation, How, apart, interval, page, pictures, runs
from jaxkv.evals.apart import Line

HOSTILE = "</td></script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp; $x^{$ \x00\x1b \u202e"
PICTURES = ("scores", "groups", "lengths", "map", "losses")
ROWS = {**POLICIES, "knorm@12": jaxkv.KNorm(budget=12), "<b>$\\frac$": jaxkv.KNorm(budget=9)}


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: its elements, and the text of its tables."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.given, self.tables, self.inside = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.given += [(tag, *each) for each in attributes]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Drawn once: a line for each policy, a map, a curve."""
    path = tmp_path_factory.mktemp("evaluations") / "out"
    told(path, Told(hostile=HOSTILE), policies=ROWS)
    return path


def test_intervals_of_shares():
    # Newcombe 1998, table I, method 3.
    for hits, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = interval((np.arange(n) < hits).astype(float))
        assert np.allclose(found, (low, high), atol=6e-5)
    # Student's, of 4 numbers: 3.182 standard errors; as far as shares go.
    values = np.asarray([0.25, 0.5, 0.75, 1.0])
    width = 3.182446 * values.std(ddof=1) / 2
    assert np.allclose(interval(values, shares=False), (0.625 - width, 0.625 + width))
    assert interval(values)[1] == 1.0 and interval(np.asarray([0.3]), shares=False) is None
    assert interval(np.asarray([1.0, 1.0]), shares=False) == (1.0, 1.0)
    # Five alike are not known for sure: as far as shares of this mean can lie apart.
    low, high = interval(np.full(5, 0.5))
    assert interval(np.asarray([0.0, 1.0] * 5))[0] > low and high == pytest.approx(1 - low)


def test_a_list_of_scores_is_as_good_as_an_array(as_users_call):
    assert interval([1, 0, 1]) == interval(np.asarray([1.0, 0.0, 1.0]))


def test_differences_that_are_all_alike_are_not_known_for_sure(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    told(tmp_path / "out", Told(groups=1, count=12))
    found = Evaluation.read(tmp_path / "out")

    def apart(first, second, unit="%"):
        scores = {"full": first, "knorm@9": second}
        records = tuple(
            dataclasses.replace(r, score=scores.get(r.policy, 0.0)) for r in found.records
        )
        run = dataclasses.replace(found.run, unit=unit)
        said = dataclasses.replace(found, records=records, run=run).difference("full", "knorm@9")
        assert said.mean == first - second
        return said.low, said.high

    # None of twelve that differ may be up to 24% of all (Wilson), each by as much as shares can.
    assert apart(0.5, 0.5) == pytest.approx((-0.2425, 0.2425), abs=1e-4)
    assert apart(1.0, 0.0) == pytest.approx((1 - 2 * 0.2425, 1.0), abs=1e-4)
    # Numbers without bounds say nothing of those not drawn.
    assert apart(3.0, 2.0, unit="nats") == (1.0, 1.0)


def test_cells_and_differences(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    told(tmp_path / "out")
    found = Evaluation.read(tmp_path / "out")
    assert found.policies == tuple(POLICIES) and found.groups == ("a", "b")
    a, b, mean = found.cell("full", "a"), found.cell("full", "b"), found.cell("full")
    assert (a.n, mean.n, mean.mean) == (7, 14, (a.mean + b.mean) / 2)
    assert mean.mean == pytest.approx(found.scores("full").mean())
    # Two groups of one size: half the interval's ends in quadrature.
    assert mean.low == pytest.approx(mean.mean - np.hypot(a.mean - a.low, b.mean - b.low) / 2)
    assert mean.high == pytest.approx(mean.mean + np.hypot(a.high - a.mean, b.high - b.mean) / 2)
    apart = found.scores("full") - found.scores("knorm@9")
    said = found.difference("full", "knorm@9")
    assert (said.above, said.below, said.n) == ((apart > 0).sum(), (apart < 0).sum(), 14)
    assert said.mean == pytest.approx(apart.mean()) and said.low < said.mean < said.high
    assert mean.rows == pytest.approx(np.mean([record.rows for record in found.of("full")]))
    with pytest.raises(ValueError, match="there are full, knorm@9"):
        found.cell("adakv")
    short = found.cell("full", length=10)
    assert found.lengths == (10, 20, 30) and short.n == 6 == len(found.of("full", length=10))
    assert short.mean == np.mean([found.scores("full", group, length=10).mean() for group in "ab"])
    with pytest.raises(ValueError, match="length=11: no sample has this tag"):
        found.cell("full", length=11)
    with pytest.raises(ValueError, match="there are a, b"):
        found.cell("full", "c")
    text = found.table()
    assert (tmp_path / "out" / "table.md").read_text() == text + "\n"
    line = f"| full | {100 * mean.mean:.1f} | {100 * mean.low:.1f} to {100 * mean.high:.1f} | 14 | {mean.rows:.1f} |"
    assert line in text and "| **mean** | 14 |" in text
    assert json.loads(json.dumps(found.as_dict()))["cells"][2]["group"] == "mean"


def test_groups_of_a_difference_have_the_weight_that_they_have_in_a_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    told(tmp_path / "out")
    whole = Evaluation.read(tmp_path / "out")
    # Seven samples of one group, and two of the other.
    kept = [record for record in whole.records if record.group == "a" or record.id in ("10", "11")]
    found = dataclasses.replace(whole, records=tuple(kept))
    said, *parts = (found.difference("full", "knorm@9", group) for group in (None, "a", "b"))
    assert [part.n for part in parts] == [7, 2] and said.n == 9
    assert said.mean == pytest.approx(found.cell("full").mean - found.cell("knorm@9").mean)
    assert said.mean == pytest.approx((parts[0].mean + parts[1].mean) / 2)
    apart = np.asarray(
        [
            one.score - other.score
            for one, other in zip(found.of("full"), found.of("knorm@9"), strict=True)
        ]
    )
    assert said.mean != pytest.approx(apart.mean())
    assert said.low == pytest.approx(
        said.mean - np.hypot(*(part.mean - part.low for part in parts)) / 2
    )
    assert said.high == pytest.approx(
        said.mean + np.hypot(*(part.high - part.mean for part in parts)) / 2
    )
    # Of a group with one sample nothing is known of how far it may lie.
    alone = dataclasses.replace(whole, records=tuple(r for r in kept if r.id != "11"))
    assert alone.difference("full", "knorm@9").low is None


def test_pictures_lie_beside_the_lines(out):
    there = {each.name for each in out.iterdir() if not each.name.startswith(".")}
    drawn = {f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png")}
    assert there == {"run.json", "samples.jsonl", "table.md"} | drawn
    assert all(
        (out / name).read_bytes().startswith(b"\x89PNG") for name in drawn if name.endswith("png")
    )
    # The same numbers are the same bytes.
    assert (
        pictures.draw(Evaluation.read(out), ("svg",))["map.svg"] == (out / "map.svg").read_bytes()
    )


def test_pictures_have_what_they_are_of(out):
    evaluation = Evaluation.read(out)
    figure = pictures._map(evaluation)
    panels = {axes.get_title().partition(":")[0]: axes for axes in figure.axes if axes.get_title()}
    assert set(panels) == set(ROWS)
    shown = panels["knorm@9"].images[0].get_array()
    assert shown.shape == (2, 3)
    mine = [r for r in evaluation.of("knorm@9") if (r.tags["depth"], r.tags["length"]) == (1, 20)]
    assert shown[1, 1] == pytest.approx(100 * sum(r.score for r in mine) / len(mine))
    scores = pictures._scores(evaluation, (None,)).axes[0]
    lines = {each.get_label(): each for each in [*scores.lines, *scores.containers]}
    assert {"full", "knorm", "streamingllm"} <= set(lines)
    knorm = lines["knorm"].lines[0].get_xydata()
    assert [round(x) for x, _ in knorm] == [9, 12]
    assert [y for _, y in knorm] == pytest.approx(
        [100 * evaluation.cell(f"knorm@{n}").mean for n in (9, 12)]
    )
    by_length = pictures._lengths(evaluation).axes[0].lines[0].get_xydata()
    assert by_length.tolist() == [
        [n, pytest.approx(100 * evaluation.cell("full", length=n).mean)] for n in (10, 20, 30)
    ]
    curve = pictures._curve(evaluation, "losses").axes[0].lines[0].get_ydata()
    losses = [record.figures["losses"] for record in evaluation.of("full")]
    assert len(curve) == 5 and curve[1] == pytest.approx(
        sum(a + b for a, b, *_ in losses) / 2 / len(losses)
    )


def test_one_budget_makes_a_bar_chart(out):
    evaluation = Evaluation.read(out)
    names = [name for name in evaluation.policies if evaluation.run.budgets[name] in (None, 9)]
    run = dataclasses.replace(
        evaluation.run,
        policies={name: evaluation.run.policies[name] for name in names},
        budgets={name: evaluation.run.budgets[name] for name in names},
    )
    records = tuple(each for each in evaluation.records if each.policy in names)
    one = dataclasses.replace(evaluation, run=run, records=records)
    for group in (None, *one.groups):
        (axes,) = pictures._scores(one, (group,)).axes
        assert [label.get_text() for label in axes.get_xticklabels()] == names
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == pytest.approx([100 * one.cell(name, group).mean for name in names])


def test_a_full_cache_that_scores_nothing_is_named(out):
    evaluation = Evaluation.read(out)
    assert evaluation.nothing is None

    def zeroed(*names):
        records = [
            dataclasses.replace(e, score=0.0) if e.policy in names else e
            for e in evaluation.records
        ]
        return dataclasses.replace(evaluation, records=tuple(records))

    assert "full" in zeroed("full").nothing
    assert zeroed(*[name for name in evaluation.policies if name != "full"]).nothing is None


def test_scores_stand_over_bytes_where_these_differ(out):
    evaluation = Evaluation.read(out)
    assert "bytes.svg" not in pictures.draw(evaluation, ("svg",))
    halved = [
        dataclasses.replace(each, nbytes=40 if each.policy == "knorm@9" else 80)
        for each in evaluation.records
    ]
    evaluation = dataclasses.replace(evaluation, records=tuple(halved))
    assert "bytes.svg" in pictures.draw(evaluation, ("svg",))
    lines = pictures._bytes(evaluation).axes[0].lines
    (knorm,) = (line.get_xydata().tolist() for line in lines if line.get_label() == "knorm")
    means = [pytest.approx(100 * evaluation.cell(f"knorm@{n}").mean) for n in (9, 12)]
    assert knorm == [[pytest.approx(4e-5), means[0]], [pytest.approx(8e-5), means[1]]]


def test_settings_that_nothing_depends_on_are_not_shown():
    from jaxkv.evals import Needle, Task
    from jaxkv.evals.arguments import settings_of

    assert Task.unused({}) == () == Needle.unused(settings_of(Needle()))
    assert "needle" in Needle.unused(settings_of(Needle(wording="small")))


def test_a_figure_with_the_name_of_a_picture_does_not_take_its_place(out):
    evaluation = Evaluation.read(out)
    figures = {"scores": [1.0, 2.0], "a/b": [1, 2]}
    records = tuple(dataclasses.replace(record, figures=figures) for record in evaluation.records)
    names = set(pictures.draw(dataclasses.replace(evaluation, records=records), ("svg",)))
    assert names == {
        f"{each}.svg" for each in ("scores", "groups", "lengths", "map", "scores_curve", "a_b")
    }
    assert pictures.draw(evaluation, ("svg",))["scores.svg"] == (out / "scores.svg").read_bytes()


def test_a_curve_ends_at_the_mean_of_all_positions(out):
    evaluation = Evaluation.read(out)
    # Stretches of two positions, and a last one of one.
    figures = {"losses": [1.0, 2.0, 6.0], "positions": [12, 14, 15]}
    records = tuple(dataclasses.replace(record, figures=figures) for record in evaluation.records)
    axes = pictures._curve(dataclasses.replace(evaluation, records=records), "losses").axes[0]
    # Five equal lines lie side by side, the third in its place.
    assert len(axes.lines) == 5 and axes.lines[2].get_xydata().tolist() == [
        [12, 1.0],
        [14, 1.5],
        [15, 12 / 5],
    ]


def test_equal_lines_are_drawn_side_by_side():
    x, half = np.asarray([1.0, 2.0, 3.0]), np.asarray([2.0])
    flat = [Line(np.asarray([1.0]), np.asarray([50.0]), horizontal=True) for _ in range(2)]
    lines = [
        Line(x, np.asarray([50.0, 50.0, 90.0])),
        *flat,
        Line(x, np.asarray([50.0, 20.0, 90.2])),
        Line(half, half),
    ]
    first, full, other, second, alone = (each.tolist() for each in apart.apart(lines, 2.5))
    # Horizontal lines stay so, the first in its place; the others make way for them, and only where they coincide.
    step = 3 / 2.5
    assert full == [50] and other == [50 - step] and alone == [2]
    assert first == [50 + step, 50 + step, 90]
    assert second == pytest.approx([50 - 2 * step, 20, 90.2 - step])
    # Markers that lie almost above one another, and those that don't.
    points = [Line(np.asarray([at]), np.asarray([7.0])) for at in (1.0, 1.01, 1.1, 2.0)]
    assert [float(each[0]) for each in apart.apart(points, 2.5)] == [7, 7 - step, 7, 7]
    twice = Line(np.asarray([1.0, 1.0]), np.asarray([3.0, 9.0]))
    assert apart.apart([twice], 2.5)[0].tolist() == [3, 9]
    # Of many none is drawn far off.
    many = apart.apart([Line(x, np.full(3, 7.0))] * 21, 2.5)
    assert (
        np.ptp(np.stack(many), axis=0) == pytest.approx(2 * 9 / 2.5)
        and (np.diff(np.stack(many), axis=0) < 0).all()
    )


def test_equal_scores_are_all_seen_and_bars_end_where_intervals_do(out):
    evaluation = Evaluation.read(out)
    # All policies have the first one's scores.
    records = evaluation.of("full")
    same = [
        dataclasses.replace(each, policy=name) for name in evaluation.policies for each in records
    ]
    found, cell = dataclasses.replace(evaluation, records=tuple(same)), evaluation.cell("full")
    panel = pictures._scores(found, (None,)).axes[0]
    bars = [each for each in panel.containers if each.get_label() != "full"]
    ends = [segment for bar in bars for segment in bar.lines[2][0].get_segments()]
    assert np.asarray([segment[:, 1] for segment in ends]) == pytest.approx(
        100 * np.asarray([[cell.low, cell.high]] * 4)
    )
    at = sorted(segment[0, 0] for segment in ends)
    assert len(set(at)) == 4 and min(b / a for a, b in itertools.pairwise(at)) > 1.01
    # Those of one budget and the line without a budget, each at a place of its own.
    ys = [line.get_ydata()[0] for line in [*(bar.lines[0] for bar in bars), panel.lines[0]]]
    assert len(set(ys)) == len(ys) == 4
    said = pictures._lengths(found)
    assert "equal lines are drawn side by side, at most" in said.get_suptitle()
    assert pictures._note(0.0) == ""


def test_shares_stand_where_their_rows_are(out):
    evaluation = Evaluation.read(out)
    budgets = {**evaluation.run.budgets, "knorm@9": 0.5, "knorm@12": 0.25, "streamingllm@9": None}
    # Of nine tokens of each prompt: in a question-agnostic run, a share of the context alone.
    rows = {"knorm@9": 4.0, "knorm@12": 2.0}
    records = [dataclasses.replace(r, rows=rows.get(r.policy, r.rows)) for r in evaluation.records]
    found = dataclasses.replace(
        evaluation, records=tuple(records), run=dataclasses.replace(evaluation.run, budgets=budgets)
    )
    panel = pictures._scores(found, (None,)).axes[0]
    knorm = (
        next(each for each in panel.containers if each.get_label() == "knorm").lines[0].get_xdata()
    )
    assert [round(float(x)) for x in knorm] == [2, 4]
    # Rows of one name without a budget have lines of their own.
    budgets |= {"knorm@9": None, "knorm@12": None, "streamingllm@9": 18}
    found = dataclasses.replace(found, run=dataclasses.replace(evaluation.run, budgets=budgets))
    lines = {each.get_label(): each for each in pictures._scores(found, (None,)).axes[0].lines}
    assert lines.keys() >= {"knorm@9", "knorm@12"}
    assert lines["knorm@9"].get_linestyle() != "" and pictures._marks(
        [64.0, 66.1, 128.0, 64.0]
    ) == [64, 128]


def test_depths_that_were_drawn_at_random_are_gathered(out):
    evaluation = Evaluation.read(out)
    count = len(evaluation.records)
    records = [
        dataclasses.replace(r, tags={**r.tags, "depth": at / count})
        for at, r in enumerate(evaluation.records)
    ]
    found = dataclasses.replace(evaluation, records=tuple(records))
    assert pictures._has_map(found)
    panel = next(axes for axes in pictures._map(found).axes if axes.get_title().startswith("full"))
    shown = panel.images[0].get_array()
    # The first policy has the first fifth of the depths.
    assert shown.shape == (10, 3) and shown[:2].count() == 6 and shown[3:].count() == 0


def test_the_page_has_it_all_and_runs_nothing_of_it(out):
    path = jaxkv.report(out)
    text = path.read_text("utf-8")
    seen = Page(text)
    assert path == out / "report.html"
    assert seen.elements.count("script") == 1 and not {"i", "iframe", "link", "object"} & set(
        seen.elements
    )
    assert [value for tag, name, value in seen.given if tag == "img" and name == "src"] == [
        "data:image/svg+xml;base64," + base64.b64encode((out / f"{name}.svg").read_bytes()).decode()
        for name in PICTURES
    ]
    assert not [each for each in seen.given if each[1].startswith("on")]
    assert not [
        value
        for _, name, value in seen.given
        if name in ("src", "href") and not value.startswith("data:")
    ]
    style, script = page.data_file("report.css"), page.data_file("report.js")
    assert style in text and "url(" not in style and "@import" not in style
    # The script that is allowed is the one that is there.
    assert text.partition("<script>")[2].partition("</script>")[0] == script
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"
        in text
    )
    policies, first, second, lengths, _, *samples = seen.tables
    assert [row[0] for row in lengths] == ["length", "10", "20", "30", "mean"]
    assert [row[0] for row in policies[1:]] == list(ROWS)
    assert first[0] == ["group", "samples", "full", "<b>$\\frac$", "knorm@9", "streamingllm@9"]
    assert second[0] == ["group", "samples", "full", "<b>$\\frac$", "knorm@12"]
    assert [row[0] for row in first[1:]] == [row[0] for row in second[1:]] == ["a", "b", "mean"]
    records = Evaluation.read(out).records
    rows = [row for table in samples for row in table[1:]]
    assert [row[0] for row in rows] == [record.id for record in records]
    for row in rows:
        assert "<script>alert(1)</script>" in row[4] and "\\x00\\x1b \\u202e" in row[4]
        assert "<script>" in row[5] and "onerror=alert(2)" in row[8]


def test_a_page_shows_as_many_samples_as_are_asked_for(out):
    text = jaxkv.report(out, samples=2).read_text("utf-8")
    assert text.count("The first 2 of 14 samples.") == len(ROWS)
    assert sum(len(table) - 1 for table in Page(text).tables[-len(ROWS) :]) == 2 * len(ROWS)
    with pytest.raises(ValueError, match="samples=-1"):
        jaxkv.report(out, samples=-1)


def test_a_page_without_matplotlib_says_so(tmp_path, monkeypatch):
    for module in (runs, page):
        monkeypatch.setattr(module, "PLOTS_MISSING", True)
    told(tmp_path / "out", Told(groups=1))
    text = jaxkv.report(tmp_path / "out").read_text("utf-8")
    assert "They need matplotlib" in text and "<img" not in text and "<h2>By group" not in text


def test_a_page_of_the_policies_that_are_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    out = tmp_path / "out"
    lines, names = told(out), [*Evaluation.read(out).policies]
    whole = jaxkv.report(out).read_text("utf-8")
    (out / "samples.jsonl").write_bytes(lines[:-1])
    page = jaxkv.report(out).read_text("utf-8")
    assert f"<b>Not finished:</b> {names[-1]}." in page and "Not finished" not in whole
    rows = [f'">{name}</td>' in page for name in names]
    assert len(names) > 1 and rows == [True] * (len(names) - 1) + [False]


def test_what_is_not_finished_has_no_page(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    out = tmp_path / "out"
    lines = told(out)
    (out / "samples.jsonl").write_bytes(b"".join(lines.splitlines(keepends=True)[:3]))
    with pytest.raises(
        ValueError, match="holds 3 of the evaluation's 42 lines: run the same command"
    ):
        jaxkv.report(out)
    for folder in (tmp_path, tmp_path / "none", out / "run.json"):
        with pytest.raises(ValueError, match="folder="):
            jaxkv.report(folder)
    assert not (out / "report.html").exists()


def test_questions_and_raised_budgets_are_told(tmp_path, monkeypatch):
    """Lines of earlier versions had no questions, and are still read."""
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    policies = {
        "snapkv@0.1": jaxkv.SnapKV(budget=0.1, window=8),
        "snapkv@0.9": jaxkv.SnapKV(budget=0.9, window=8),
    }
    for agnostic in (True, False):
        out = tmp_path / str(agnostic)
        lines = told(out, Words(count=2), policies=policies, how=How(agnostic=agnostic, raw=True))
        found = Evaluation.read(out)
        assert found.raised.endswith(": snapkv@0.1 2.") and found.raised in found.table()
        assert {each.question for each in found.records} == {" w1 w2"}
        text = page.report(out).read_text()
        assert found.raised in text and all("w1 w2" in row for row in Page(text).tables[-1][1:])
        old = [
            {name: each for name, each in json.loads(line).items() if name != "question"}
            for line in lines.split(b"\n")[:-1]
        ]
        (out / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in old))
        assert {each.question for each in Evaluation.read(out).records} == {""}
    told(tmp_path / "none")
    assert not Evaluation.read(tmp_path / "none").raised
