"""Chat templates are code from elsewhere: sandboxed, bounded in output, and never run before they are needed."""

import copy
import pickle

import pytest
from test_text import byte_level, conversation, open_folder

from jaxkv.checkpoints import chat_template
from jaxkv.checkpoints.chat_template import render_chat_template
from jaxkv.text.tokenizer import ChatTokenizer

FAILURES = {
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "nesting": "{{ " + "(" * 100_000 + " }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "objects": "{{ ''.__class__.__mro__ }}",
    "changes": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_template_that_fails_is_an_error_of_the_template(failure, monkeypatch):
    monkeypatch.setattr(chat_template, "_MOST_CHARACTERS", 1 << 20)
    with pytest.raises(ValueError, match="MemoryError|RecursionError|OverflowError|unsafe"):
        render_chat_template(FAILURES[failure], messages=[])


def test_a_failure_names_the_template_and_leaves_it_usable():
    text = ChatTokenizer(
        byte_level(),
        template="{% if messages %}{{ 1 / (messages | length - 1) }}{% endif %}",
        origin="odd-model",
    )
    with pytest.raises(
        ValueError,
        match=r"messages=\['user'\]: the chat template of odd-model rejects .*ZeroDivision",
    ):
        text.render_chat(conversation("Hi"), generation_prompt=True)
    assert text.render_chat(conversation("Hi", "Ho"), generation_prompt=True) == "1.0"


def test_no_template_runs_at_load(tmp_path):
    byte_level("<s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    text = ChatTokenizer.from_checkpoint(open_folder(tmp_path))
    assert text.has_template and text.eos_ids == ()
    with pytest.raises(ValueError, match="ZeroDivision"):
        _ = text.turn_texts


def test_texts_with_a_template_are_copied_and_pickled():
    text = ChatTokenizer(
        byte_level("<s>"), template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert text.turn_texts.opening == ""
    for other in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert other.render_chat(conversation("Hi", "Ho"), generation_prompt=True) == "HiHo"


def test_long_conversations_have_room():
    long = "é" * 4_000_000
    source = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    assert render_chat_template(source, messages=conversation(long, long)) == long * 2
