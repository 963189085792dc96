"""Anthropic's client: a message and a stream, whose texts must be equal; with a tool where the model has calls."""

import sys

import anthropic

URL, MODEL = sys.argv[1:3]
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
BODY = {"model": MODEL, "max_tokens": 24, "system": "Be brief."}
BODY |= {"messages": [{"role": "user", "content": "Name a colour of the sky."}]}
BODY |= {"extra_body": {"temperature": 0}}

message = client.messages.create(**BODY)
print(message.stop_reason, message.usage, message.content)
with client.messages.stream(**BODY) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
assert text == "".join(each.text for each in message.content if each.type == "text")
assert [each.to_dict() for each in last.content] == [each.to_dict() for each in message.content]
if "--tools" in sys.argv:
    tools = [{"name": "find", "input_schema": {"type": "object", "properties": {"town": {}}}}]
    with client.messages.stream(**BODY, tools=tools) as stream:
        last = stream.get_final_message()
    print(last.stop_reason, last.content)
    results = [
        {"type": "tool_result", "tool_use_id": each.id, "content": "blue"}
        for each in last.content
        if each.type == "tool_use"
    ]
    assert results and last.stop_reason == "tool_use"
    BODY["messages"] += [
        {"role": "assistant", "content": last.content},
        {"role": "user", "content": results},
    ]
    print(client.messages.create(**BODY, tools=tools).content)
