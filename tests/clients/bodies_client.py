"""Bodies as vLLM's benchmark sends them (a text and a chat, as streams) and lm-evaluation-harness (a chat)."""

import json
import sys

import httpx2

URL, MODEL = sys.argv[1:3]
ASKED, STREAM = "Name a colour of the sky.", {"stream": True}
STREAM |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
TEXT = {"model": MODEL, "prompt": ASKED, "repetition_penalty": 1.0, "max_tokens": 24}
CHAT = {"model": MODEL, "max_completion_tokens": 24}
CHAT["messages"] = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
HARNESS = {"model": MODEL, "max_tokens": 24, "temperature": 0, "seed": 1234, "stop": ["\n\n"]}
HARNESS["messages"] = [{"role": "user", "content": ASKED, "type": "text"}]

with httpx2.Client(base_url=URL, timeout=600, trust_env=False) as client:
    for path, body in (
        ("/completions", TEXT | {"logprobs": None} | STREAM),
        ("/chat/completions", CHAT | STREAM),
        ("/chat/completions", HARNESS),
    ):
        answer = client.post(path, json=body)
        answer.raise_for_status()
        if "stream" in body:
            *events, end = [each[6:] for each in answer.text.split("\n\n") if each]
            assert end == "[DONE]"
            print(path, json.loads(events[-1])["usage"])
        else:
            print(path, answer.json()["choices"])
