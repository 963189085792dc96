"""`jaxkv serve` under OpenAI's own clients: 64 at once, clients that misbehave, and `kill -9`.

    .venv/bin/python -m benchmarks.openai_clients [--model smollm2-135m-instruct] [--clients 64]

It starts the server, asks by the sync and the async client, streaming and not, and checks each answer. Then 1,000 idle
connections, 100 half-sent bodies and 20 readers that read nothing stay open while others ask; `kill -9` ends the server
under load, and the next one serves the documents that were saved. It prints a line for each part and raises
AssertionError where one fails.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import openai

KEY, QUESTION = "sesame", "Name a colour of the sky, and say in one sentence why it is so."
CHAT = [{"role": "user", "content": QUESTION}]
TEXT = "The tower was built in 1889 and is 330 metres tall. " * 10


class Serving:
    """A server's process, and its address."""

    def __init__(self, model, documents):
        options = (
            "--policy snapkv --budget 256 --slots 8 --max-prompt-tokens 1024 --max-new-tokens 200"
        )
        command = [sys.executable, "-m", "jaxkv", "serve", "--model", model, *options.split()]
        command += ["--served-model-name", "model", "--port", "0", "--documents", documents]
        environment = {**os.environ, "JAXKV_API_KEY": KEY}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError("".join(self.lines))
        threading.Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True).start()

    def client(self, kind=openai.OpenAI, **options):
        """A client of OpenAI's that does not try again."""
        options = {"api_key": KEY, "max_retries": 0, "timeout": 600, **options}
        return kind(base_url=f"http://127.0.0.1:{self.port}/v1", **options)

    def metric(self, name):
        """The value of one metric."""
        return float(re.search(rf"^{name}{{.*}} (\S+)$", self.page("/metrics"), flags=re.M)[1])

    def page(self, path):
        """The text of a page that is not OpenAI's."""
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(asked) as answer:
            return answer.read().decode()

    def raw(self, data=b""):
        """A connection of its own, on which `data` has been sent."""
        found = socket.create_connection(("127.0.0.1", self.port))
        found.sendall(data)
        return found


def said(part, begun, text):
    print(f"{part:<22} {time.monotonic() - begun:7.1f} s  {text}", flush=True)


def options(tokens):
    return {"model": "model", "messages": CHAT, "temperature": 0, "max_tokens": tokens}


def many(serving, count):
    """All clients ask the same, whole and in pieces: the answers must be equal."""
    begun = time.monotonic()
    client = serving.client()

    def ask(at):
        if at % 2:
            pieces = client.chat.completions.create(stream=True, **options(24))
            return "".join(each.choices[0].delta.content or "" for each in pieces)
        return client.chat.completions.create(**options(24)).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(ask, range(count)))
    assert len(set(answers)) == 1 and answers[0]
    said("sync clients", begun, f"{count} at once, half of them streams: {answers[0]!r}")

    async def asks():
        client = serving.client(openai.AsyncOpenAI)

        async def ask(at):
            if at % 2:
                pieces = await client.chat.completions.create(stream=True, **options(24))
                return "".join([each.choices[0].delta.content or "" async for each in pieces])
            return (await client.chat.completions.create(**options(24))).choices[0].message.content

        return await asyncio.gather(*(ask(at) for at in range(count)))

    begun = time.monotonic()
    assert set(asyncio.run(asks())) == set(answers)
    said("async clients", begun, f"{count} at once, half of them streams: the same answers")


def crowd(serving):
    """Idle connections, half-sent bodies and readers that do not read, beside one that asks."""
    begun, client = time.monotonic(), serving.client()
    alone = time.monotonic()
    client.chat.completions.create(**options(24))
    alone = time.monotonic() - alone
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: "
    body = json.dumps({**options(200), "stream": True, "ignore_eos": True})
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(serving.raw())
        for _ in range(100):
            stack.enter_context(serving.raw(f"{head}900\r\n\r\n{{".encode()))
        for _ in range(20):
            stack.enter_context(serving.raw(f"{head}{len(body)}\r\n\r\n{body}".encode()))
        beside = time.monotonic()
        client.chat.completions.create(**options(24))
        beside = time.monotonic() - beside
        health = time.monotonic()
        serving.page("/health")
        health = time.monotonic() - health
    while serving.metric("jaxkv_slots_taken") + serving.metric("jaxkv_queue_requests"):
        time.sleep(0.02)
    text = f"an answer in {alone:.1f} s alone, {beside:.1f} s beside 1,120 connections (20 answers before it), "
    said(
        "crowd",
        begun,
        text + f"/health in {health * 1000:.0f} ms; all slots free once they had gone",
    )


def killed(serving, model, folder):
    """Kill -9 in mid-load; the next server has the documents."""
    begun, client = time.monotonic(), serving.client()
    document = client.post("/documents", body={"text": TEXT}, cast_to=dict[str, object])["id"]
    ask = {**options(16), "messages": [{"role": "user", "content": "How tall is it?"}]}
    before = (
        client.chat.completions.create(**ask, extra_body={"document": document})
        .choices[0]
        .message.content
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(client.chat.completions.create, **options(200)) for _ in range(8)]
        time.sleep(0.5)
        serving.process.kill()
        failed = [type(call.exception()).__name__ for call in calls]
    serving.process.wait()
    assert set(failed) <= {"APIConnectionError", "NoneType"}, failed
    again = Serving(model, folder)
    after = again.client().chat.completions.create(**ask, extra_body={"document": document})
    assert after.choices[0].message.content == before
    said("kill -9", begun, f"the next server has the document, and the same answer: {before!r}")
    return again


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        serving = Serving(given.model, folder)
        try:
            many(serving, given.clients)
            crowd(serving)
            serving = killed(serving, given.model, folder)
            assert not [line for line in serving.lines if "Traceback" in line or QUESTION in line]
        finally:
            serving.process.kill()


if __name__ == "__main__":
    main()
