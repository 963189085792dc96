"""Anthropic's client: a message and a stream, whose texts must be equal, and a call of a tool with its result."""

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

schema = {
    "type": "object",
    "properties": {"where": {"enum": ["up", "down"]}},
    "required": ["where"],
    "additionalProperties": False,
}
BODY |= {"tools": [{"name": "look", "input_schema": schema}], "max_tokens": 300}
with client.messages.stream(**BODY, tool_choice={"type": "any"}) as stream:
    last = stream.get_final_message()
print(last.stop_reason, last.content)
(call,) = (each for each in last.content if each.type == "tool_use")
assert last.stop_reason == "tool_use" and call.input["where"] in ("up", "down")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "blue"}
BODY["messages"] += [
    {"role": "assistant", "content": last.content},
    {"role": "user", "content": [result]},
]
print(client.messages.create(**BODY, tool_choice={"type": "none"}).content)
