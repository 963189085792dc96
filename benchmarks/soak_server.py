"""A server under clients of all kinds at once: none hangs, no answer is lost, each is what a quiet server gives.

    python -m benchmarks.soak_server [--minutes 20] [--compared 1000] [--model NAME | --model tiny]

`tiny` is a random Llama of three layers with SmolLM2's tokenizer, written to a temporary folder.

Threads hold conversations, post documents, ask for penalties, log-probabilities, JSON and scored prompts, break off
streams, send bodies that are wrong, and flood the queue. Afterwards a part of the answers, greedy or with a seed, is
asked again of a second server with as many slots, without a prefix cache, which reads prompts one by one. Texts may
differ only where two tokens' logits are within rounding.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import save_file

import jaxkv
from benchmarks import record
from benchmarks.serving_http import serving

MODEL, SLOTS, CLIENTS, NEW = "smollm2-135m-instruct", 8, 12, 24
# Only policies under which a continued conversation has the tokens of its whole prompt.
POLICIES = {"full": "full", "full:snapkv-budget-128": "snapkv --budget 128"}
LIMITS = {"max_prompt_tokens": 1024, "max_new_tokens": 64, "queue": 64}
SHARED = {"max_question_tokens": 256, "prefix_bytes": 60_000_000}
PLAIN = {"max_question_tokens": 256, "prefix_cache": "none", "prefill_tokens": 1}
TEXT = (record.ROOT / "benchmarks" / "data" / "document.txt").read_text()
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}
# Of `--model tiny`.
WIDTH, HIDDEN = 64, 128
TINY = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LINEAR = {
    "self_attn.q_proj": (64, WIDTH),
    "self_attn.k_proj": (32, WIDTH),
    "self_attn.v_proj": (32, WIDTH),
    "self_attn.o_proj": (WIDTH, 64),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
WRONG = (
    {"temperature": -1},
    {"messages": []},
    {"max_tokens": 0},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": 7}},
        }
    },
    {"tool_choice": "required"},
    {"logit_bias": {"-3": 1}},
    {"guided_regex": "("},
    {"n": 1000},
    {"best_of": 2},
)
# Nats within which two tokens are a tie.
TIE = 2e-3


class Rejected(Exception):
    """An answer with a status of an error, which is the argument."""


def post(port, path, body, close_after=None):
    """Posts JSON; returns the answer's JSON, or the events of a stream, which is closed after some of them."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            if not body.get("stream"):
                return json.load(answer)
            events = []
            for line in answer:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                if close_after is not None and len(events) >= close_after:
                    return None
            return events
    except urllib.error.HTTPError as error:
        raise Rejected(error.code, error.read().decode()[:300]) from None


def text_of(path, answer):
    """The text of an answer, whole or in events, and why it ended."""
    if isinstance(answer, list):
        choices = [each for event in answer for each in event.get("choices", ())]
        text = "".join(
            each.get("text") or (each.get("delta") or {}).get("content") or "" for each in choices
        )
        return text, next(filter(None, (each.get("finish_reason") for each in choices)))
    (choice, *_) = answer["choices"]
    text = choice["message"]["content"] if path == CHATS else choice["text"]
    return text, choice["finish_reason"]


class Soak:
    """What the clients share: the server, counts of what they did, and answers to compare."""

    def __init__(self, port, end):
        self.port, self.end = port, end
        self.counts, self.answers, self.faults = collections.Counter(), [], []

    def piece(self, rng):
        """Some words of the document; many clients get the same beginning."""
        words = TEXT.split()
        at = rng.choice([0, 0, 0, 150, 300]) if rng.random() < 0.7 else rng.randrange(600)
        return " ".join(words[at : at + rng.randrange(5, 260)])

    def settings(self, rng):
        """How to sample: greedy or with a seed, often with penalties and biases."""
        made = {"max_tokens": rng.randrange(1, NEW)}
        made |= (
            {"temperature": 0} if rng.random() < 0.6 else {"seed": rng.randrange(999), "top_p": 0.9}
        )
        if rng.random() < 0.2:
            made |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {"30": -5}}
        if rng.random() < 0.15:
            made |= {"stop": [" the"]}
        return made

    def converse(self, rng):
        """A conversation of up to four turns."""
        messages, model = [], rng.choice([*POLICIES])
        for turn in range(rng.randrange(1, 5)):
            said = self.piece(rng) if not turn else rng.choice(["Why?", "Go on.", "Who said so?"])
            messages.append({"role": "user", "content": said})
            body = {"model": model, "messages": list(messages), **self.settings(rng)}
            if rng.random() < 0.1:
                body["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "sky", "schema": SCHEMA},
                }
                body["max_tokens"] = 40
            answer = self.ask(CHATS, body, rng)
            if answer is None:
                return
            text, reason = answer
            # An answer that its limit cut off is no whole object.
            whole = "response_format" in body and reason != "length"
            if whole and json.loads(text)["sky"] not in ("blue", "grey"):
                self.faults.append(("schema", body, text))
            messages.append({"role": "assistant", "content": text})

    def complete(self, rng):
        """A text continued, sometimes several answers, or a scored prompt."""
        body = {"model": rng.choice([*POLICIES]), "prompt": self.piece(rng), **self.settings(rng)}
        if rng.random() < 0.2:
            body |= {"echo": True, "logprobs": 2}
            answer = post(self.port, TEXTS, body)
            (scored,) = (each["logprobs"]["token_logprobs"] for each in answer["choices"])
            if scored[0] is not None or any(each > 0 for each in scored[1:]):
                self.faults.append(("scores", body, scored))
            self.counts["scored"] += 1
        elif rng.random() < 0.2:
            answer = post(self.port, TEXTS, body | {"n": 2, "logprobs": 3})
            if len(answer["choices"]) != 2:
                self.faults.append(("n", body, answer))
            self.counts["two answers"] += 1
        else:
            self.ask(TEXTS, body, rng)

    def ask(self, path, body, rng):
        """Asks, whole, as a stream, or as one that is broken off; returns text and reason, None if it was."""
        way = rng.random()
        if way < 0.12:
            post(self.port, path, body | {"stream": True}, close_after=rng.randrange(1, 4))
            self.counts["broken off"] += 1
            return None
        answer = post(self.port, path, body | ({"stream": True} if way < 0.5 else {}))
        text, reason = text_of(path, answer)
        self.answers.append((path, body, text))
        self.counts["answered"] += 1
        if isinstance(answer, dict):
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self.counts["from a prefix"] += cached > 0
        return text, reason

    def document(self, rng):
        """A document posted, asked and removed."""
        made = post(self.port, "/v1/documents", {"model": "full", "text": self.piece(rng)})["id"]
        messages = [{"role": "user", "content": "What is this about?"}]
        body = {"model": "full", "messages": messages, "max_tokens": 8, "document": made}
        post(self.port, CHATS, body)
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/documents/{made}", method="DELETE"
        )
        urllib.request.urlopen(asked, timeout=300).close()
        self.counts["documents"] += 1

    def others(self, rng):
        """The forms of other APIs, and bodies that are wrong."""
        if rng.random() < 0.5:
            body = {"model": "full", "messages": [{"role": "user", "content": "Hello."}]}
            try:
                post(self.port, CHATS, body | rng.choice(WRONG))
                self.faults.append(("accepted", body, None))
            except Rejected as rejected:
                if not 400 <= rejected.args[0] < 500:
                    raise
            self.counts["wrong bodies"] += 1
            return
        post(
            self.port, "/v1/responses", {"model": "full", "input": "Hello.", "max_output_tokens": 9}
        )
        messages = [{"role": "user", "content": self.piece(rng)}]
        post(self.port, "/v1/messages", {"model": "full", "messages": messages, "max_tokens": 9})
        self.counts["other forms"] += 2

    def flood(self, rng):
        """More requests at once than the queue holds: each is answered, or rejected as busy."""

        def one(_):
            try:
                post(self.port, TEXTS, {"model": "full", "prompt": "The sky", "max_tokens": 2})
                return 200
            except Rejected as rejected:
                return rejected.args[0]

        with concurrent.futures.ThreadPoolExecutor(100) as pool:
            statuses = collections.Counter(pool.map(one, range(100)))
        self.counts.update({f"flood {status}": count for status, count in statuses.items()})
        if not set(statuses) <= {200, 429, 503}:
            self.faults.append(("flood", dict(statuses), None))

    def run_client(self, seed):
        """One client, until the time is over."""
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            kind = rng.choices(
                [self.converse, self.complete, self.document, self.others, self.flood],
                [50, 30, 5, 14, 5 if seed == 0 else 0],
            )[0]
            try:
                kind(rng)
            except Rejected as rejected:
                # A flood of another client filled the queue.
                self.counts[f"status {rejected.args[0]}"] += 1
                if rejected.args[0] not in (429, 503):
                    self.faults.append((kind.__name__, rejected.args, None))
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                self.faults.append((kind.__name__, repr(error), None))


def is_tie(port, path, body, text, other):
    """True if the texts part where the likeliest two tokens are within rounding; greedy answers only."""
    asked = {"logprobs": True, "top_logprobs": 2} if path == CHATS else {"logprobs": 2}
    answer = post(port, path, body | asked)
    logprobs = answer["choices"][0]["logprobs"]
    if path == CHATS:
        rows = [
            (each["token"], [top["logprob"] for top in each["top_logprobs"]])
            for each in logprobs["content"]
        ]
    else:
        rows = [
            (token, sorted(top.values(), reverse=True))
            for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        ]
    common = next(
        (at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
        min(len(text), len(other)),
    )
    seen = 0
    for token, tops in rows:
        seen += len(token)
        if seen > common - 1 and tops[0] - tops[1] < TIE:
            return True
    return False


def compare(model, answers, count):
    """Asks a part of the answers again of a plain server; returns how many were compared, ties and differences."""
    chosen = random.Random(1).sample(answers, min(count, len(answers)))
    found = collections.Counter(compared=len(chosen))
    with serving(model, POLICIES, slots=SLOTS, limits=LIMITS | PLAIN) as (port, _):

        def one(row):
            path, body, text = row
            other, _ = text_of(path, post(port, path, body))
            if other == text:
                return "equal"
            return "tie" if is_tie(port, path, body, text, other) else "different"

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for row, kind in zip(chosen, pool.map(one, chosen), strict=True):
                found[kind] += 1
                if kind == "different":
                    print("different:", json.dumps(row)[:2000], flush=True)
    return dict(found)


def metrics(port):
    """Figures of the server by name, of the first model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = [each.decode().rsplit(" ", 1) for each in answer if not each.startswith(b"#")]
    return {name: float(value) for name, value in lines}


def write_tiny_model(folder):
    """Writes a random Llama with SmolLM2's tokenizer; returns the folder's path."""
    source = jaxkv.load(MODEL, progress=False)
    config = TINY | {"vocab_size": source.config.vocab, "bos_token_id": source.config.bos}
    config["eos_token_id"] = list(source.config.eos)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(source.text.tokenizer_json())
    specials = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    chat = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source.text.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials | chat))
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    tensors = {"model.embed_tokens.weight": random(source.config.vocab, WIDTH)}
    tensors["model.norm.weight"] = np.ones(WIDTH, np.float32)
    for layer in range(TINY["num_hidden_layers"]):
        for name, shape in LINEAR.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random(*shape) * shape[1] ** -0.5 * 1.6
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def main():
    """Runs the clients, then compares; returns 1 for any fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--compared", type=int, default=1000)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "soak_server.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder)) if given.model == "tiny" else given.model
        return soak(model, given)


def soak(model, given):
    """Runs the clients against a model's server, then compares; returns 1 for any fault."""
    with serving(model, POLICIES, slots=SLOTS, limits=LIMITS | SHARED) as (port, process):
        clients = Soak(port, time.monotonic() + 60 * given.minutes)
        memory = []
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(clients.run_client, seed) for seed in range(CLIENTS)]
            while any(not each.done() for each in running):
                memory.append(psutil.Process(process.pid).memory_info().rss)
                print(f"{memory[-1] / 1e6:.0f} MB, {dict(clients.counts)}", flush=True)
                concurrent.futures.wait(running, timeout=60)
        time.sleep(5)
        busy = {
            name: value
            for name, value in metrics(port).items()
            if value and ("running" in name or "waiting" in name) and "bucket" not in name
        }
    if busy:
        clients.faults.append(("still busy", busy, None))
    for each in clients.faults[:20]:
        print("fault:", str(each)[:1000], flush=True)
    found = {
        "machine": record.machine(),
        "model": given.model,
        "minutes": given.minutes,
        "counts": dict(clients.counts),
        "memory": {"quarter": memory[len(memory) // 4], "end": memory[-1], "most": max(memory)},
        "faults": len(clients.faults),
        "compared": compare(model, clients.answers, given.compared),
    }
    record.save(given.out, found)
    print(json.dumps(found, indent=1))
    return int(bool(found["faults"] or found["compared"].get("different")))


if __name__ == "__main__":
    sys.exit(main())
