"""pydantic-ai: a chat whole and in pieces, and an output by a schema and by a call of a tool."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:3]
ASKED = "Name a colour of the sky."
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))


class Weather(BaseModel):
    """The weather of a town; a random model would add properties for ever."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["blue", "grey"]
    warm: bool


async def ask_all():
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 24})
    whole = (await agent.run(ASKED)).output
    print(repr(whole))
    async with agent.run_stream(ASKED) as answer:
        pieces = [each async for each in answer.stream_text(delta=True, debounce_by=None)]
    assert whole == "".join(pieces)
    for kind in (NativeOutput(Weather, strict=True), ToolOutput(Weather)):
        long = {"temperature": 0, "max_tokens": 300}
        found = (await Agent(model, output_type=kind, model_settings=long).run(ASKED)).output
        print(found)
        assert isinstance(found, Weather)


asyncio.run(ask_all())
