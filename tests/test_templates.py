"""Chat templates are code from elsewhere: bounded in time, memory and output, and never run before they are needed."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_text import byte_level, conversation, open_folder

from jaxkv.checkpoints import chat_template
from jaxkv.checkpoints.chat_template import ChatTemplate
from jaxkv.text.tokenizer import Text

ROOT = Path(__file__).parent.parent
GROW = "{% set ns = namespace(s=SEED) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
BOMBS = {
    "product": "{{ 'x' * 10**10 }}",
    "product of a list": "{{ [0] * 10**10 }}",
    "padding": "{{ 'x' | center(10**10) }}",
    "indent": "{{ 'x\nx' | indent(10**10) }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000d}'.format(1) }}",
    "doubling": GROW.replace("SEED", "'x'"),
    "doubling of a list": GROW.replace("SEED", "[0]"),
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 100_000 + " }}",
}
LOOPS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (10**10**4) ** (10**4) }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


def alive(template):
    process = template._worker._process
    return process.pid if process.poll() is None else None


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_is_bounded(bomb):
    with pytest.raises(ValueError, match="MemoryError|RecursionError|OverflowError"):
        ChatTemplate(BOMBS[bomb]).render()


@pytest.mark.parametrize("loop", LOOPS)
def test_time_is_bounded(loop, monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 1.0)
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"it ran for more than 1 s|integer string conversion"):
        ChatTemplate(LOOPS[loop]).render()
    assert time.perf_counter() - started < 5


def test_a_failure_names_the_template_and_leaves_it_usable():
    text = Text(
        byte_level(), template="{% if messages %}{{ 1 / (messages | length - 1) }}{% endif %}", origin="odd-model"
    )
    with pytest.raises(ValueError, match=r"messages=\['user'\]: the chat template of odd-model refuses .*ZeroDivision"):
        text.chat(conversation("Hi"), generation_prompt=True)
    assert text.chat(conversation("Hi", "Ho"), generation_prompt=True) == "1.0"
    with pytest.raises(ValueError, match="odd-model refuses these .*object is neither text nor"):
        text.chat([{"role": "user", "content": object()}], generation_prompt=True)


def test_no_template_runs_at_load(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    byte_level("<s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(BOMBS["product"])
    text = Text.from_checkpoint(open_folder(tmp_path))
    assert text.has_template
    monkeypatch.undo()
    assert text.eos_ids == ()
    with pytest.raises(ValueError, match="MemoryError"):
        _ = text.turns


def test_one_process_serves_all_and_is_replaced_when_it_goes():
    template = ChatTemplate("{{ x }}")
    assert template.render(x="1") == "1"
    first = alive(template)
    assert template.render(x="é\n\ud800") == "é\n\ud800" and alive(template) == first
    os.kill(first, signal.SIGKILL)
    assert template.render(x="3") == "3" and alive(template) != first
    process = template._worker._process
    del template
    gc.collect()
    assert process.poll() is not None and process.stdin.closed and process.stdout.closed


def test_an_interrupt_leaves_no_answer_for_the_next(monkeypatch):
    template = ChatTemplate("{{ x }}")
    template.render(x="1")

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    template._worker._process.stdout.close()
    template._worker._process.stdout = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        template.render(x="2")
    assert template.render(x="3") == "3"


def test_no_python_to_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ValueError, match="no process could be started for it: /no/such/python: No such file"):
        ChatTemplate("{{ x }}").render(x="1")


def test_copies_and_pickles_leave_the_process_out():
    template = ChatTemplate("{{ x }}")
    template.render(x="1")
    for other in (copy.deepcopy(template), pickle.loads(pickle.dumps(template))):
        assert other._worker is None and other.render(x="2") == "2"


SCRIPT = """
import os, sys
for at in (0, 1, 2):
    os.close(at)
from jaxkv.checkpoints.chat_template import ChatTemplate
template = ChatTemplate("{{ x }}")
text = template.render(x="1")
child = os.fork()
if not child:
    os._exit(template.render(x="2") != "2")
sound = os.waitpid(child, 0)[1] == 0 and template.render(x="3") == "3" and text == "1"
open(sys.argv[1], "w").write(f"{sound} {template._worker._process.pid}")
"""


def test_without_standard_streams_and_after_a_fork(tmp_path):
    """And nothing stays behind."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py", str(tmp_path / "out")]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=60).returncode == 0
    sound, pid = (tmp_path / "out").read_text().split()
    assert sound == "True"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_long_conversations_have_room():
    long = "é" * 4_000_000
    assert (
        ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}").render(
            messages=conversation(long, long)
        )
        == long * 2
    )
