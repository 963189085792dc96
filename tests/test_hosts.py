"""Two processes of four devices each on one mesh: the tokens of one process, and one end for both where one fails."""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import hosts_process as process
import numpy as np
import pytest
from orbax_cases import ROOT

import jaxkv
from jaxkv.machine import hosts

# Of a pair that waits in vain; on a busy machine one that does not takes minutes.
_MOST_SECONDS = 900


@functools.cache
def run(what):
    """What the two processes said, and their ends: one pair for all tests that ask for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command, folder = [sys.executable, process.__file__], tempfile.mkdtemp()
    pair = [
        subprocess.Popen(
            [*command, str(rank), str(port), what, folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(process.PROCESSES)
    ]
    out = []
    try:
        for each in pair:
            said, err = each.communicate(timeout=_MOST_SECONDS)
            lines = [json.loads(line[5:]) for line in said.splitlines() if line.startswith("said ")]
            out.append((each.returncode, lines, err, time.time()))
    finally:
        for each in pair:
            each.kill()
            # Behind a timeout: its pipes are closed, and it is waited for.
            each.communicate()
        shutil.rmtree(folder)
    return out


def said(what, kind):
    """What each process said of this kind, both having come to where one of them ends."""
    ends = run(what)
    last = [lines[-1][0] if lines else None for _, lines, _, _ in ends]
    assert last == ["drawing", "drawing"], [err[-2000:] for _, _, err, _ in ends]
    return [[(of, value) for which, of, value in lines if which == kind] for _, lines, _, _ in ends]


@functools.cache
def alone(name):
    return [*process.answers(process.whole_model(), name)]


@pytest.mark.parametrize("shape, name", process.CASES)
def test_both_processes_have_the_tokens_of_one(shape, name):
    for told in said("answering", "tokens"):
        (found,) = [value for of, value in told if of == [list(shape), name]]
        assert found == alone(name)


def test_a_loaded_model_is_asked_on_top_of_a_cache():
    model = jaxkv.load(process.LOADED)
    expected = [(model.fingerprint, process.questions(model, progress=False)[0])]
    assert said("answering", "questions") == [expected, expected]


def test_one_process_shows_bars_and_both_stream():
    (_, _, first, _), (_, _, second, _) = run("answering")
    assert "decode" in first and "decode" not in second
    _, ((_, shown),) = said("answering", "shown")
    assert re.fullmatch(r"KVCache\(AdaKV\(.*\); 1 sequence; \d\.\d+ MB; turn: raw\)", shown)


REFUSED = {
    "prompt": r"ValueError: prompt=.*process 1 has another value than process 0: use the same in all processes",
    "policy": r"ValueError: policy='?.SnapKV\(budget=3[23].*process 1",
    "key": r"ValueError: key=[01]: process 1",
    "ids": r"ValueError: ids=.*process 1",
    "call": r"ValueError: call=.*\{0: 'jaxkv.generate', 1: 'jaxkv.prefill'\}: keep them in step",
    "mesh": r"ValueError: mesh=.*process 1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_process_is_given_otherwise_all_refuse(name):
    for told in said("refused", "refused"):
        assert re.search(REFUSED[name], dict(told)[name])


@pytest.mark.parametrize(
    "name, call, field", [("path", "load", "name_or_path"), ("cache", "load_cache", "path")]
)
def test_what_one_process_cannot_load_none_does(name, call, field):
    first, second = (dict(told)[name] for told in said("refused", "refused"))
    assert re.match(
        rf"RuntimeError: jaxkv\.{call} failed in process 1: ValueError: {field}=.*nowhere", first
    )
    assert re.match(rf"ValueError: {field}=.*nowhere", second)


def test_a_cache_of_both_is_saved_by_one_and_loaded_by_both():
    (((_, (asked, back)),), again) = said("refused", "saved")
    assert asked == back and again == [("", [asked, back])]


def test_refusals_leave_the_processes_in_step():
    tokens = alone("full")[0]
    assert said("refused", "in step") == [[("", tokens)], [("", tokens)]]


# In any of these orders, and from whichever of JAX's threads speaks first: that another process is gone, and which.
ENDS = {
    "killed": (
        "another task died",
        r"Task 1 heartbeat timeout|stopped sending heartbeats\):\s+1\b",
    ),
    "raises": (
        "another task died",
        "Shutdown barrier has failed",
        r"Barrier timed out(?s:.*)timed out task names:\s+0\b",
    ),
}


@pytest.mark.parametrize("what, dies", process.ENDS.items())
def test_the_end_of_one_process_is_the_end_of_both(what, dies):
    """Within the timeout of `jax.distributed.initialize`, and with the words that docs/scaling.md promises."""
    ends = run(what)
    began = max(value for _, lines, _, _ in ends for kind, _, value in lines if kind == "drawing")
    code, _, err, ended = ends[0]
    assert code != 0 and ended - began < min(process.TIMEOUTS[dies]) + 25
    assert all(re.search(words, err) for words in ENDS[dies]), err[-5000:]
    if dies == "killed":
        assert ends[1][0] == -9
    else:
        assert "LookupError: a mistake of one process" in ends[1][2]


def test_values_have_one_text_in_any_process():
    class Own:
        pass

    value = [{"a": np.arange(3)}, jaxkv.SnapKV(budget=32), Own(), "x", 1, 1.0, None, jaxkv.SnapKV]
    again = [{"a": np.arange(3)}, jaxkv.SnapKV(budget=32), Own(), "x", 1, 1.0, None, jaxkv.SnapKV]
    assert hosts._describe_value(value) == hosts._describe_value(again)
    with pytest.raises(ValueError, match="untouched"), hosts.share_failures("nothing", None):
        raise ValueError("untouched")
