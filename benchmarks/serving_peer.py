"""transformers' continuous batching for `benchmarks.serving`: a line of JSON with requests in, one with times out.

    .venv-peer/bin/python -m benchmarks.serving_peer FILE.gguf SLOTS LONGEST

Its own process and environment, that of `peer_worker.py`. Its paged cache has room for SLOTS sequences of LONGEST
tokens.
"""

import sys
import time

import transformers

from benchmarks.peer_worker import load
from benchmarks.workers import serve

# Tokens of a page, and the most tokens of prompts in one pass.
PAGE, PASS = 32, 1024


def main(path, slots, longest):
    """Answers lines until the input ends."""
    pages = int(slots) * -(-int(longest) // PAGE)
    config = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        num_blocks=pages,
        block_size=PAGE,
        max_batch_tokens=PASS,
    )

    def served():
        model = load(path, "float32")
        return {}, lambda asked: answered(model, config, asked["prompts"], asked["new"])

    serve(served)


def answered(model, config, prompts, new):
    """Seconds of all requests together, of the process, of each its first token, and per token after it."""
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    # It allocates its cache and warms up in its thread.
    warm(manager, prompts[0])
    begun, cpu = time.perf_counter(), time.process_time()
    for prompt, count in zip(prompts, new, strict=True):
        manager.add_request(prompt, max_new_tokens=count, record_timestamps=True)
    firsts, later = [], []
    while len(firsts) < len(prompts):
        state = manager.get_result(timeout=5)
        if state is None:
            if not manager.is_running():
                raise SystemExit("transformers' continuous batching ended by itself")
            continue
        if state.is_finished():
            if state.error is not None:
                raise SystemExit(f"transformers rejected a request: {state.error}")
            times = state.timestamps
            firsts.append(times[0] - begun)
            later.append((times[-1] - times[0]) / max(1, len(times) - 1))
    found = {
        "seconds": time.perf_counter() - begun,
        "cpu": time.process_time() - cpu,
        "firsts": firsts,
        "later": later,
    }
    manager.stop(block=True)
    return found


def warm(manager, prompt):
    """Answers one request whose times do not count."""
    manager.add_request(prompt, max_new_tokens=2)
    while True:
        state = manager.get_result(timeout=5)
        if state is not None and state.is_finished():
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
