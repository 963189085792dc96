"""Reasoning and tool calls are split off answers, the same wherever their text is cut; malformed calls remain text."""

import json
import string

import agents
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.text.answer_parsing import AnswerParser, choose_answer_format
from jaxkv.text.chat import Chat

USER = [{"role": "user", "content": "Hi"}]
CALLS = [("find", {"town": "Köln\n<x>"}), ("add", {"terms": [1, -2.5, None]})]
ONE, TWO = ({"name": name, "arguments": arguments} for name, arguments in CALLS)
FINDS, ADDS = (json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS)
LLAMA = [{"name": name, "parameters": arguments} for name, arguments in CALLS]
HEAD = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
# Format, answer, content, reasoning, calls.
ANSWERS = [
    ("hermes", "Hello, <b>you</b> ", "Hello, <b>you</b> ", "", []),
    ("hermes", "<think>\nHm </x\n</think>\n\nYes.", "Yes.", "Hm </x\n", []),
    ("hermes", "<think>cut", "", "cut", []),
    ("hermes", "a <think>b</think>", "a <think>b</think>", "", []),
    (
        "hermes",
        f"<think>Hm</think>Sure. <tool_call>\n{json.dumps(ONE)}\n</tool_call>\n"
        f"<tool_call>{json.dumps(TWO)}</tool_call>\n",
        "Sure. ",
        "Hm",
        CALLS,
    ),
    ("hermes", f"<tool_call>{json.dumps(ONE)}", "", "", CALLS[:1]),
    ("hermes", "So <tool_call>{oops}</tool_call>.", "So <tool_call>{oops}</tool_call>.", "", []),
    ("llama3", ";\n".join(map(json.dumps, LLAMA)), "", "", CALLS),
    ("llama3", f"<|python_tag|>{json.dumps(LLAMA[0])}", "", "", CALLS[:1]),
    ("llama3", f"{{find{FINDS}", f"{{find{FINDS}", "", []),
    ("llama3", '{"name": "find"}', '{"name": "find"}', "", []),
    ("llama3", f"I say {json.dumps(LLAMA[0])}", f"I say {json.dumps(LLAMA[0])}", "", []),
    ("mistral", f"[TOOL_CALLS] {json.dumps([ONE, TWO])}", "", "", CALLS),
    ("mistral", f"Ok[TOOL_CALLS]find[ARGS]{FINDS}[TOOL_CALLS]add[ARGS]{ADDS}", "Ok", "", CALLS),
    ("mistral", f"[TOOL_CALLS]find[CALL_ID]aB3[ARGS]{FINDS}", "", "", CALLS[:1]),
    ("mistral", "[TOOL_CALLS]find[ARGS]{", "[TOOL_CALLS]find[ARGS]{", "", []),
    (
        "harmony",
        f"{HEAD}{PREAMBLE}<|channel|>commentary to=functions.find json<|message|>{FINDS}<|call|>",
        "I look.",
        "Hm.",
        CALLS[:1],
    ),
    (
        "harmony",
        f"{HEAD} to=functions.add<|channel|>commentary json<|message|>{ADDS}<|call|>",
        "",
        "Hm.",
        CALLS[1:],
    ),
    ("harmony", f"{HEAD}<|channel|>final<|message|>Hello <|return|>", "Hello ", "Hm.", []),
    ("harmony", "<|channel|>analysis<|message|>cut here", "", "cut here", []),
    ("harmony", f"{HEAD}<|channel|>fin", "", "Hm.", []),
    ("harmony", "No header.", "No header.", "", []),
    (
        "harmony",
        f"{HEAD}<|channel|>commentary to=functions.add<|message|>{{1}}<|call|>",
        "{1}",
        "Hm.",
        [],
    ),
]


def format_of(kind, **options):
    chat = Chat(messages=USER, tools=agents.TOOLS)
    return choose_answer_format(agents.tokenizer(kind), chat, **options)


def parsed(format, *pieces):
    """Content, reasoning and calls of an answer, as joined deltas; the message must say the same."""
    parser, found = AnswerParser(format), {"content": "", "reasoning_content": ""}
    deltas = [delta for piece in pieces for delta in parser.push_text(piece)]
    calls = []
    for delta in deltas + parser.flush_text():
        ((name, value),) = delta.items()
        if name != "tool_calls":
            found[name] += value
            continue
        (call,) = value
        if "id" in call:
            assert call["index"] == len(calls) and call["function"].pop("arguments") == ""
            calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
        else:
            assert call["index"] == len(calls) - 1
            calls[-1]["function"] |= call["function"]
    assert parser.message["content"] == found["content"]
    assert parser.message.get("reasoning_content", "") == found["reasoning_content"]
    assert parser.message.get("tool_calls", []) == calls
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [each["function"] for each in calls]
    return *found.values(), [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize(("kind", "text", "content", "reasoning", "calls"), ANSWERS)
def test_answers_are_split_wherever_they_are_cut(kind, text, content, reasoning, calls):
    format, expected = format_of(kind), (content, reasoning, calls)
    assert parsed(format, text) == expected
    assert parsed(format, *text) == expected
    for at in range(1, len(text)):
        assert parsed(format, text[:at], text[at:]) == expected, text[:at]


MARKERS = "<think> </think> <tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] <|channel|> <|message|> <|end|>"
MARKERS = [
    *MARKERS.split(),
    "<|start|>",
    "analysis",
    "to=functions.f",
    "<",
    "[",
    "{",
    "}",
    " ",
    "\n",
]
MARKERS += [
    json.dumps(ONE),
    json.dumps([TWO]),
    json.dumps(LLAMA[0]),
    "\ud7ff",
    '{"a": NaN}',
    "[" * 9999,
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*agents.TEMPLATES]),
    st.lists(st.sampled_from(MARKERS) | st.text(string.ascii_letters), max_size=12),
    st.data(),
)
def test_no_answer_is_an_error(kind, parts, data):
    text, format = "".join(parts), format_of(kind)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(format, text)
    assert parsed(format, *pieces) == whole
    for _, arguments in whole[2]:
        assert isinstance(arguments, dict)


def test_formats_follow_the_template_the_names_and_the_tools():
    def markers(*args, tools=agents.TOOLS, **options):
        chat = Chat(messages=USER, tools=tools)
        return choose_answer_format(agents.tokenizer(*args), chat, **options).markers

    for kind in agents.TEMPLATES:
        assert markers(kind) == markers(kind, tool_parser=kind)
        assert "call" not in markers(kind, tool_parser="none")
        assert "call" not in markers(kind, tools=())
        assert "reasoning_content" not in markers(kind, reasoning_parser="none")
    assert "reasoning_content" in markers("hermes", tools=()) and "reasoning_content" in markers(
        "harmony", tools=()
    )
    assert "reasoning_content" not in markers("llama3") and "reasoning_content" not in markers(
        "mistral"
    )
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert markers("llama3", tools=()) == {"content": {}}
    assert "call" in markers("hermes", tool_parser="mistral") and plain


def test_a_template_may_begin_the_reasoning():
    source = "{% for m in messages %}{{ m.content }}</think>{% endfor %}{% if t is not defined %}<think>\n{% endif %}"
    agents.ENDS[source] = "</s>"
    text = agents.tokenizer(source)
    thinks = choose_answer_format(text, Chat(messages=USER))
    assert parsed(thinks, "Hm</think>", "\nYes") == ("Yes", "Hm", [])
    assert parsed(thinks, "\nHm") == ("", "Hm", [])
    told = choose_answer_format(text, Chat(messages=USER, template_arguments={"t": 1}))
    assert parsed(told, "Yes") == ("Yes", "", [])
