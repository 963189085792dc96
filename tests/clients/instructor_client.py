"""instructor: a model of pydantic by a schema, and by a call of a tool."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


class Weather(BaseModel):
    """The weather of a town; a random model would add properties for ever."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["blue", "grey"]
    warm: bool


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        response_model=Weather,
        messages=[{"role": "user", "content": "Name a colour of the sky."}],
        temperature=0,
        max_tokens=300,
        max_retries=1,
    )
    print(mode, found)
    assert isinstance(found, Weather)
