"""What an attack on exports has found: each was wrong, or without an end, before."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.exporting import runtime

MODEL = tiny.shape(layers=2, kv_heads=2, group=2, dim=8)
POLICY = jaxkv.SnapKV(budget=24, window=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    target = tmp_path_factory.mktemp("exports") / "out"
    of = {"lengths": 64, "question": 16, "new": 16, "batch": 2}
    return runtime.Model(jaxkv.export(tiny.tiny(MODEL), target, policy=POLICY, **of))


def test_an_answer_in_a_filled_batch_serves_several_prompts(model):
    """Rows that fill a batch hold no answer: the next questions are asked of the sequence that does."""
    prompt, questions = tiny.prompts(5, (61,)), tiny.prompts(6, (5, 9))
    mine = model.generate(questions, 4, cache=model.generate(prompt, 8)[2])[0]
    cache = jaxkv.generate(tiny.tiny(MODEL), prompt, policy=POLICY, max_new_tokens=8).cache
    theirs = jaxkv.generate(tiny.tiny(MODEL), questions, cache=cache, max_new_tokens=4)
    assert mine == [row.tolist() for row in theirs.tokens]


def test_prompts_as_one_array(model):
    ids = np.asarray(tiny.prompts(5, (20, 20)))
    assert model.draw(model.read(ids), 4)[0].tolist() == model.generate(ids.tolist(), 4)[0]


def test_a_stream_tells_each_token_once(capsys, monkeypatch):
    """Also where a sequence ends between two reports."""
    drawn = [np.arange(n)[None] for n in (8, 11)]

    def decode(ids):
        return "".join(f"<{each}>" for each in ids)

    fake = types.SimpleNamespace(text=types.SimpleNamespace(decode=decode))
    fake.generate = lambda prompts, tell: [tell(each) for each in drawn]
    source = Path(runtime.__file__).read_text("utf-8")
    main = re.search(r'\nif __name__ == "__main__":\n(.*)', source, re.DOTALL)[1]
    names = vars(runtime) | {"Model": lambda folder: fake}
    for words in ([], ["What", "is", "it?"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["runtime.py", *words])
        with pytest.raises(SystemExit, match="usage: runtime.py 'PROMPT'"):
            exec("if True:\n" + main, names)
    monkeypatch.setattr(sys, "argv", ["runtime.py", "What is it?"])
    exec("if True:\n" + main, names)  # the lines that run for `python DIR/runtime.py 'PROMPT'`
    assert capsys.readouterr().out == decode(range(11))
