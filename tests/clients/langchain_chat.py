"""langchain-openai: a chat whole, and in pieces."""

import sys

from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1:3]
ASKED = "Name a colour of the sky."
chat = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=24)
whole = chat.invoke(ASKED).content
print(repr(whole))
assert whole == "".join(each.content for each in chat.stream(ASKED))
