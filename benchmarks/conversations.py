"""Conversations of five turns about one document over HTTP: with the server's prefix cache, and without.

The client knows nothing of documents: each turn sends the whole conversation, as chats do. Two servers run side by
side, one of them with `--prefix-cache none`, and get each turn one after the other. Printed are the ratios of the times
to the first token, whether the full cache gives equal texts, and how many questions are answered, also when the same
document is posted once and asked::

    python -m benchmarks.conversations
"""

import argparse
import contextlib
import json
import statistics
import time
import urllib.request

from benchmarks import qa_peer, record
from benchmarks.serving_http import serving

# Words of a document, some 1,500 tokens.
MODEL, NEW, WORDS = "smollm2-135m-instruct", 24, 1250
# Arguments of policies by the name of their model.
POLICIES = {"full": "full", "full:kvzip-budget-0.25": "kvzip --budget 0.25"}


def post(port, path, body):
    """Sends JSON; returns the open response."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(asked)


def ask(port, model, messages, **more):
    """One streamed answer: its text, seconds to its first piece, and its usage."""
    body = {"model": model, "messages": messages, "max_tokens": NEW, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | more
    begun, first, text, usage = time.perf_counter(), None, "", None
    with post(port, "/v1/chat/completions", body) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            sent = json.loads(line[6:])
            usage = sent.get("usage") or usage
            piece = "".join(each["delta"].get("content", "") for each in sent["choices"])
            if piece and first is None:
                first = time.perf_counter() - begun
            text += piece
    return text, first, usage


def converse(ports, model, row):
    """A conversation with both servers in turns; returns the list of their (text, seconds, usage, right) by turn."""
    found = {name: [] for name in ports}
    talks = {name: [] for name in ports}
    for at, question in enumerate(row["questions"]):
        text = question["question"] if at else f"{row['document']}\n\n{question['question']}"
        for name, port in ports.items():
            talks[name].append({"role": "user", "content": text})
            said, first, usage = ask(port, model, talks[name])
            talks[name].append({"role": "assistant", "content": said})
            right = question["answer"].lower() in said.lower()
            found[name].append((said, first, usage, right))
    return found


def posted(port, model, row):
    """How many questions are answered on the same document, posted once."""
    with post(port, "/v1/documents", {"model": model, "text": row["document"]}) as answer:
        document = json.load(answer)["id"]
    right = 0
    for question in row["questions"]:
        messages = [{"role": "user", "content": question["question"]}]
        said, _, _ = ask(port, model, messages, document=document)
        right += question["answer"].lower() in said.lower()
    return right


def main():
    """Runs all conversations and prints the figures of each policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = qa_peer.rows(options.seed, WORDS)[: options.conversations]
    limits = {"max_prompt_tokens": 2560, "max_new_tokens": NEW, "max_question_tokens": 128}
    results = {"machine": record.machine(), "policies": {}}
    with contextlib.ExitStack() as stack:
        ports = {}
        for name, reuse in (("with", "auto"), ("without", "none")):
            started = serving(MODEL, POLICIES, slots=2, limits=limits | {"prefix_cache": reuse})
            ports[name], _ = stack.enter_context(started)
        for model in POLICIES:
            # Programs compile before the clock runs.
            converse(ports, model, qa_peer.rows(options.seed + 1, WORDS)[0])
            talks = [converse(ports, model, row) for row in rows]
            ratios = [
                mine[1] / other[1]
                for talk in talks
                for mine, other in list(zip(talk["with"], talk["without"], strict=True))[1:]
            ]
            usage = talks[0]["with"][-1][2]
            found = {
                "tokens of a last prompt": usage["prompt_tokens"],
                "of them reused": usage["prompt_tokens_details"]["cached_tokens"],
                "first token, with / without, turns 2 to 5": [
                    round(value, 3)
                    for value in (statistics.median(ratios), min(ratios), max(ratios))
                ],
                "equal texts": sum(
                    mine[0] == other[0]
                    for talk in talks
                    for mine, other in zip(talk["with"], talk["without"], strict=True)
                ),
                "answered with": sum(each[3] for talk in talks for each in talk["with"]),
                "answered without": sum(each[3] for talk in talks for each in talk["without"]),
                "answered on the posted document": sum(
                    posted(ports["with"], model, row) for row in rows
                ),
            }
            results["policies"][model] = found
            print(model, json.dumps(found), flush=True)
    record.save(record.RESULTS / "conversations.json", results)


if __name__ == "__main__":
    main()
