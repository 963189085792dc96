"""Settings of tasks and the files that they read, of every odd kind: made plain, or rejected by name."""

import dataclasses
import json
import os
from pathlib import Path

import eval_models
import numpy as np
import pytest

from jaxkv.evals.needle import Needle
from jaxkv.evals.perplexity import TextLossTask
from jaxkv.evals.published import LongBench
from jaxkv.evals.texts import read_texts

OFFICIAL = Path(__file__).parent / "official"


def test_numbers_of_numpy_and_lists_are_as_good_as_plain_ones(as_users_call):
    plain = Needle(lengths=(512, 600), depths=(0.1, 1.0), count=2, seed=3)
    given = {"lengths": [np.int32(512), 600], "depths": [np.float32(0.1), 1.0]}
    made = Needle(**given, count=np.int64(2), seed=np.uint8(3))
    assert made == plain and hash(made) == hash(plain) == hash(dataclasses.replace(made))
    plainly = (*made.lengths, *made.depths, made.count)
    assert [type(each) for each in plainly] == [int, int, float, float, int]
    with pytest.raises(ValueError, match="^count=-1"):
        dataclasses.replace(made, count=-1)


def lines(tmp_path, name, *rows, mark=b"", end=b"\n"):
    path = tmp_path / name
    path.write_bytes(
        mark + end.join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + end
    )
    return path


@pytest.mark.parametrize("mark,end", [(b"", b"\n"), (b"\xef\xbb\xbf", b"\r\n"), (b"", b"\n\r\n\n")])
def test_lines_end_with_a_line_feed_alone(tmp_path, mark, end):
    odd = "one\u2028two\x85three\u2029four\x1cfive"
    path = lines(tmp_path, "texts.jsonl", {"text": odd}, {"text": "plain"}, mark=mark, end=end)
    assert list(read_texts(str(path)).values()) == [odd, "plain"]
    row = json.loads((OFFICIAL / "longbench" / "hotpotqa.jsonl").read_bytes().splitlines()[0])
    lines(tmp_path, "hotpotqa.jsonl", {**row, "context": odd}, row, mark=mark, end=end)
    made = LongBench(data=str(tmp_path), tasks=("hotpotqa",)).samples(
        eval_models.speaking(positions=8192)
    )
    assert len(made) == 2 and made[0].context.endswith(odd)


def test_texts_that_are_none_are_refused_by_name(tmp_path):
    for name, data in {
        "b.jsonl": b"{",
        "c.jsonl": b"[]",
        "d.txt": b"\xff\xfe",
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="^data="):
            TextLossTask(data=str(tmp_path / name), prefix=1, tokens=1).samples(
                eval_models.speaking()
            )
    (tmp_path / "e.txt").write_bytes(b"\xef\xbb\xbfWords")
    os.symlink(tmp_path / "e.txt", tmp_path / "f.txt")
    assert read_texts(str(tmp_path / "f.txt")) == {"f": "Words"}
    os.symlink(tmp_path / "nowhere", tmp_path / "g.txt")
    with pytest.raises(FileNotFoundError, match="^data="):
        read_texts(str(tmp_path / "g.txt"))


def test_prompts_longer_than_the_models_positions_are_refused_before_anything_runs():
    of = LongBench(data=str(OFFICIAL / "longbench"), tasks=("narrativeqa",), longest=8000)
    with pytest.raises(ValueError, match="^longest="):
        of.samples(eval_models.speaking(positions=512))


def test_haystacks_begin_without_a_mark_and_hold_words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"\xef\xbb\xbfFirst words.\r\nAnd more of them.\r\n" * 40)
    task = Needle(lengths=(600,), depths=(1.0,), haystack=str(path))
    model = eval_models.speaking(positions=1024)
    (sample,) = task.samples(model)
    assert "<book> First words. And more" in sample.context and "\r" not in sample.context
    path.write_text(" \n")
    with pytest.raises(ValueError, match="^haystack="):
        task.samples(model)
