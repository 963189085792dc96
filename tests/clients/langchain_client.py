"""langchain-openai: a chat whole and in pieces, JSON of a schema, and a call of a tool."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:3]
ASKED = "Name a colour of the sky."
OPTIONS = {"model": MODEL, "base_url": URL, "api_key": "none", "temperature": 0, "max_retries": 0}


class Weather(BaseModel):
    """The weather of a town; a random model would add properties for ever."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["blue", "grey"]
    warm: bool


@tool
def look(where: Literal["up", "down"]) -> str:
    """Looks up or down."""
    return where


short = ChatOpenAI(**OPTIONS, max_tokens=24)
whole = short.invoke(ASKED).content
print(repr(whole))
assert whole == "".join(each.content for each in short.stream(ASKED))
long = ChatOpenAI(**OPTIONS, max_tokens=300)
for method in ("json_schema", "function_calling"):
    found = long.with_structured_output(Weather, method=method).invoke(ASKED)
    print(method, found)
    assert isinstance(found, Weather)
(call,) = long.bind_tools([look], tool_choice="required", strict=True).invoke(ASKED).tool_calls
print(call)
assert call["name"] == "look" and look.invoke(call["args"]) in ("up", "down")
