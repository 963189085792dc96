"""Asks one question about a real document with a full cache and with compressed ones, and prints a table.

Then compresses a report before any question about it is there, and asks three. Run by `make demo`.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

START = time.perf_counter()
DOCUMENT = Path(__file__).parent / "data" / "document.txt"
QUESTION = "What is the great national staple of Brazil?"
MODEL = "smollm2-135m-instruct"
BUDGET, MORE_BUDGETS = 256, (512,)
REPORT = DOCUMENT.with_name("report.txt")
# Each with the words that make its answer right.
QUESTIONS = {
    "Who is the director of the station?": "Margaret Okafor",
    "How many pairs of terns were there?": "212",
    "Where was the new boat built?": "Velden",
}
SHARE = 0.5
COLUMNS = (
    ("policy", 10),
    ("budget", 6),
    ("kept", 7),
    ("prefill s", 9),
    ("decode tok/s", 12),
    ("cache before", 12),
    ("after", 9),
    ("compile s", 9),
)


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout holds the table alone."""
    print(line, file=sys.stderr, flush=True)


def line(cells) -> str:
    """One row of the table: the first cell to the left, figures to the right."""
    (_, first), *rest = COLUMNS
    head, *others = cells
    return "  ".join(
        [
            f"{head:<{first}}",
            *(f"{cell:>{width}}" for cell, (_, width) in zip(others, rest, strict=True)),
        ]
    )


def ask_many(model, policies) -> None:
    """Compresses a report once by each policy, asks each cache three questions, and prints the answers."""
    import jaxkv

    report = REPORT.read_text("utf-8").strip()
    print(
        "\nA field station's annual report, compressed before a question about it is there, then asked three.\n"
    )
    for policy in policies:
        with warnings.catch_warnings():
            # SnapKV looks at the report's end, and says so: here that is what is shown.
            warnings.simplefilter("ignore", jaxkv.policies.UnseenQuestionWarning)
            cache = jaxkv.prefill(model, report, policy=policy)
        told = [
            jaxkv.generate(model, each, cache=cache, max_new_tokens=24).text for each in QUESTIONS
        ]
        right = sum(answer in text for answer, text in zip(QUESTIONS.values(), told, strict=True))
        print(
            f"{type(policy).__name__:<12} {cache.kept_nbytes / 1e6:5.1f} MB, {right} of {len(QUESTIONS)} right",
            flush=True,
        )
        for question, text in zip(QUESTIONS, told, strict=True):
            print(f"    {question} {' '.join(text.split())}", flush=True)


def main() -> None:
    """Prints the table, a row and its answer at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--all", action="store_true", help="more policies and budgets")
    options = parser.parse_args()

    say("importing jaxkv ...")
    import jaxkv
    from jaxkv.machine.compilation import enable_compilation_cache

    enable_compilation_cache()
    say(f"loading {MODEL} (fetched once, 93 MB) ...")
    model = jaxkv.load(MODEL)
    prompt = DOCUMENT.read_text("utf-8").strip() + "\n\n" + options.question
    say(f"ready after {time.perf_counter() - START:.0f} s; each row reads the whole document twice")

    runs: list[tuple[str, int | None, jaxkv.Policy]] = [("FullKV", None, jaxkv.FullKV())]
    policies = (
        (jaxkv.SnapKV, jaxkv.PyramidKV, jaxkv.AdaKV) if options.all else (jaxkv.SnapKV, jaxkv.AdaKV)
    )
    for policy in policies:
        budgets = (BUDGET, *MORE_BUDGETS) if options.all else (BUDGET,)
        runs += [(policy.__name__, budget, policy(budget=budget)) for budget in budgets]

    print(f"\nChester A. Arthur, message to Congress, 1883. Q: {options.question}\n")
    print(line(name for name, _ in COLUMNS))
    print(line("-" * width for _, width in COLUMNS), flush=True)
    for name, budget, policy in runs:
        call = {"policy": policy, "max_new_tokens": options.max_new_tokens}
        compile_seconds = jaxkv.generate(model, prompt, **call).stats.compile_seconds
        # Speeds are those of a run that compiles nothing.
        result = jaxkv.generate(model, prompt, **call)
        stats = result.stats
        cells = (
            name,
            "all" if budget is None else budget,
            f"{stats.kept:.0f}",
            f"{stats.prefill_seconds:.1f}",
            f"{stats.decode_tokens_per_second:.1f}",
            f"{stats.full_bytes / 1e6:.1f} MB",
            f"{stats.kept_bytes / 1e6:.1f} MB",
            f"{compile_seconds:.1f}",
        )
        print(line(cells))
        print(f"    {' '.join(result.text.split())}", flush=True)
    layers, heads = model.config.layers, model.config.kv_heads
    print(
        f"\nThe prompt has {stats.prompt_tokens} tokens. Budget and kept: entries per kv head, on average over"
    )
    print(
        f"{layers} layers of {heads} kv heads. Speeds: of a second run. Compile: waited for in the first."
    )
    print("Before: keys and values of all of the prompt's tokens. After: those that are kept.")
    unseen = [jaxkv.DefensiveKV(budget=SHARE)]
    if options.all:
        unseen += [jaxkv.FullKV(), jaxkv.SnapKV(budget=SHARE)]
    ask_many(model, unseen)
    print(f"\nTotal {time.perf_counter() - START:.0f} s.")


if __name__ == "__main__":
    main()
