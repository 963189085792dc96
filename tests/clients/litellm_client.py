"""litellm: a chat whole, and in pieces."""

import sys

import litellm

URL, MODEL = sys.argv[1:3]
ASKED = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": "Name a colour of the sky."}],
    "temperature": 0,
    "max_tokens": 24,
}
whole = litellm.completion(**ASKED).choices[0].message.content
print(repr(whole))
pieces = litellm.completion(**ASKED, stream=True)
assert whole == "".join(each.choices[0].delta.content or "" for each in pieces)
