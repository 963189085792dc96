"""OpenAI's own client: a chat whole, in pieces and by its async client, and a text continued."""

import asyncio
import sys

import openai

URL, MODEL = sys.argv[1:3]
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name a colour of the sky."}],
    "temperature": 0,
    "max_tokens": 24,
}
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
whole = client.chat.completions.create(**ASKED)
print(repr(whole.choices[0].message.content), whole.usage)
pieces = client.chat.completions.create(**ASKED, stream=True)
assert whole.choices[0].message.content == "".join(
    each.choices[0].delta.content or "" for each in pieces
)
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
again = asyncio.run(client.chat.completions.create(**ASKED))
assert again.choices[0].message.content == whole.choices[0].message.content
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
text = client.completions.create(model=MODEL, prompt="The sky is", temperature=0, max_tokens=24)
print(repr(text.choices[0].text))
