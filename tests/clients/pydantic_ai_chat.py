"""pydantic-ai: a chat whole, and in pieces."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:3]
ASKED = "Name a colour of the sky."
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 24})


async def asks():
    whole = (await agent.run(ASKED)).output
    print(repr(whole))
    async with agent.run_stream(ASKED) as answer:
        pieces = [each async for each in answer.stream_text(delta=True, debounce_by=None)]
    assert whole == "".join(pieces)


asyncio.run(asks())
