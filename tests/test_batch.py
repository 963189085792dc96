"""`jaxkv batch`: answers as `generate`'s, lines that are no requests, runs that go on, files that are rejected."""

import json

import lettered
import pytest
from cli_runs import refused

import jaxkv
from jaxkv import cli
from jaxkv.serving import batch_answers, engine_config
from jaxkv.serving.batch_lines import read_batch_lines

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
OPTIONS = ("--model", "tiny", "--slots", "2", "--max-prompt-tokens", "64", "--max-new-tokens", "40")
POLICY = ("--policy", "knorm", "--budget", "16")


def chat(name, text=lettered.DOC, **body):
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": CHATS,
        "body": {"messages": messages, **GREEDY, **body},
    }


@pytest.fixture
def asked(monkeypatch):
    """Lets the command find the tiny model; gives the custom_ids of the lines that are begun."""
    begun, reply = [], batch_answers.BatchFileRunner._compute_completion

    def noted(self, line):
        begun.append(line.custom_id)
        return reply(self, line)

    monkeypatch.setattr(batch_answers.BatchFileRunner, "_compute_completion", noted)
    monkeypatch.setattr(engine_config, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(engine_config, "load", lambda name, **_: lettered.tiny())
    return begun


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def written(path, lines):
    path.write_text(
        "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    )


def run(files, *policy):
    assert (
        cli.main(["batch", str(files[0]), "-o", str(files[1]), *OPTIONS, *(policy or POLICY)]) == 0
    )
    return [json.loads(line) for line in files[1].read_text().splitlines()]


def content(answer):
    return answer["response"]["body"]["choices"][0]["message"]["content"]


def alone(text, **options):
    message = [{"role": "user", "content": text}]
    options = {"max_new_tokens": 9, "stop_at_eos": False, **options}
    return jaxkv.generate(lettered.tiny(), message, policy=jaxkv.KNorm(budget=16), **options).text


def test_lines_are_answered_in_their_order_and_bad_ones_have_errors(files, asked, capsys):
    texts = {f"r{at}": lettered.DOC[: 19 + 3 * at] for at in range(4)}
    body = {"prompt": ["abc", "de"], "n": 2, **GREEDY}
    several = {"custom_id": "two", "url": TEXTS, "body": body}
    # Behind a blank line.
    odd = [
        "{nonsense",
        "[1]",
        chat("r1"),
        {**chat("x"), "url": "/v1/embeddings"},
        {**chat("y"), "more": 1},
        f'{{"custom_id": "long", "body": "{"x" * (8 << 20)}"}}',
    ]
    bad = [
        (chat("long", "x" * 80), "messages", 400),
        (chat("stream", stream=True), "stream", 400),
        (chat("other", model="gpt"), "model", 404),
        (chat("none", document="doc-1"), "document", 404),
    ]
    lines = [*(chat(*each) for each in texts.items()), "", *odd, *(line for line, *_ in bad)]
    written(files[0], [*lines, several])
    found = run(files)
    assert [content(each) for each in found[:4]] == [alone(text) for text in texts.values()]
    assert [each["custom_id"] for each in found[:4]] == list(texts)
    for number, each in enumerate(found[4:10], 6):
        assert each["response"] is None and f"line {number}:" in each["error"]["message"]
    for (line, param, status), each in zip(bad, found[10:14], strict=True):
        assert each["custom_id"] == line["custom_id"] and each["error"] is None
        assert each["response"]["status_code"] == status
        assert each["response"]["body"]["error"]["param"] == param
    last = found[-1]["response"]["body"]
    assert [each["index"] for each in last["choices"]] == [0, 1, 2, 3] and last["usage"][
        "completion_tokens"
    ] == 36
    assert "10 of them without status 200" in capsys.readouterr().err
    assert sorted(each.name for each in files[0].parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_run_that_was_ended_goes_on(files, asked, monkeypatch, capsys):
    """Samples without a seed are the same again, what is answered is not asked again, half a line is."""
    lines = [chat(f"r{at}", temperature=1, top_p=0.9) for at in range(6)]
    written(files[0], lines)
    whole = [content(each) for each in run(files)]
    assert len(set(whole)) > 1
    data = files[1].read_bytes().splitlines(keepends=True)
    files[1].unlink()
    partial = files[1].with_name("out.jsonl.partial")
    partial.write_bytes(b"".join(data[1:4]) + data[4][:50])
    asked.clear()

    def failing(self, line):
        raise OSError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(batch_answers.BatchFileRunner, "answer_line", failing)
        assert cli.main(["batch", str(files[0]), "-o", str(files[1]), *OPTIONS, *POLICY]) == 2
    assert partial.exists() and not files[1].exists()
    asked.clear()
    assert [content(each) for each in run(files)] == whole
    assert sorted(asked) == ["r0", "r4", "r5"] and not partial.exists()
    assert "3 of 6 lines are answered already" in capsys.readouterr().err
    # A changed request and a new one are asked, the others are not.
    asked.clear()
    written(files[0], [chat("r0", "abc"), *lines[1:], chat("r6", "abc")])
    found = [content(each) for each in run(files)]
    assert (
        sorted(asked) == ["r0", "r6"]
        and found[0] == found[-1] == alone("abc")
        and found[1:-1] == whole[1:]
    )


def test_files_that_cannot_be(files, asked, capsys):
    command = ("batch", str(files[0]), "-o", str(files[1]), *OPTIONS, *POLICY)
    assert "FILE=" in refused(capsys, *command)
    written(files[0], [""])
    assert "FILE=" in refused(capsys, *command)
    written(files[0], [chat("r0")])
    assert "-o=" in refused(capsys, "batch", str(files[0]), "-o", str(files[0]), *OPTIONS, *POLICY)
    run(files)
    capsys.readouterr()
    # Answers of another policy; and something else behind them.
    assert "-o=" in refused(capsys, *command, "--budget", "9")
    found = files[1].read_bytes() + b"mine\n"
    files[1].write_bytes(found)
    assert "-o=" in refused(capsys, *command)
    assert files[1].read_bytes() == found


def test_other_files_beside_the_answers_stay(asked, files, capsys):
    """A partial file of something else, or one that is FILE itself, is neither cut nor removed."""
    command = ("-o", str(files[1]), *OPTIONS, *POLICY)
    written(files[0], [chat("a")])
    partial = files[1].with_name("out.jsonl.partial")
    for text in ("notes\n", json.dumps(chat("a")) + "\n"):
        partial.write_text(text)
        assert "-o=" in refused(capsys, "batch", str(files[0]), *command)
        assert partial.read_text() == text and not asked
    written(partial, [chat("a")])
    assert "-o=" in refused(capsys, "batch", str(partial), *command)
    assert json.loads(partial.read_text()) == chat("a") and not asked


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    written(plain, [chat("a"), chat("b")])
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert list(read_batch_lines(marked, "")) == list(read_batch_lines(plain, ""))
