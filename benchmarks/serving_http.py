"""`jaxkv serve` as a contestant of `benchmarks.serving`: its process, and clients that read streams over HTTP."""

import concurrent.futures
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request

import psutil


@contextlib.contextmanager
def serving(model, policies, *, slots, limits):
    """Context manager of a server's process; yields its port, and a psutil process for its CPU time.

    `policies` are the arguments of each policy by the model's name in requests.
    """
    (name, first), *others = policies.items()
    command = [
        sys.executable,
        "-m",
        "jaxkv",
        "serve",
        "--model",
        model,
        "--served-model-name",
        name,
    ]
    command += [
        "--dtype",
        "float32",
        "--slots",
        str(slots),
        "--port",
        "0",
        "--max-question-tokens",
        "0",
    ]
    command += [f"--{key.replace('_', '-')}={value}" for key, value in limits.items()]
    command += ["--policy", first, *(word for _, each in others for word in ("--also", each))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", line):
                # Its log must not fill the pipe.
                threading.Thread(target=lambda: [*process.stderr], daemon=True).start()
                yield int(found[1]), psutil.Process(process.pid)
                return
        raise SystemExit("jaxkv serve did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.wait()


def by_http(port, process, model, prompts, new):
    """All requests sent at once, read as streams: seconds, CPU seconds of the server, first tokens, per token after."""
    before, begun = process.cpu_times(), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(streamed, port, model, *each) for each in zip(prompts, new, strict=True)
        ]
        times = [each.result() for each in asked]
    seconds, after = time.perf_counter() - begun, process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    later = [(each[-1] - each[0]) / (count - 1) for each, count in zip(times, new, strict=True)]
    return seconds, cpu, [each[0] - begun for each in times], later


def streamed(port, model, prompt, count):
    """Times at which the pieces of one answer's text came; the number of its tokens is checked."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    times, usage = [], None
    with urllib.request.urlopen(asked) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            sent = json.loads(line[6:])
            usage = sent.get("usage") or usage
            if sent.get("choices"):
                times.append(time.perf_counter())
    if usage is None or usage["completion_tokens"] != count:
        raise SystemExit(f"an answer of {count} tokens came with the usage {usage}")
    return times
