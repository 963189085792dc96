"""How many of ten needles in 1024 tokens are found, policy by policy, with kvpress' figures beside ours.

Run it with jaxkv's environment; it takes minutes on two cores::

    python benchmarks/needle.py [--model NAME] [--budgets 128 256]

The prompts and the peer's figures are those of ``tests/golden/parity/needle1024.json`` (its README says how they were
made). With ten cases, one more or less is noise. The first rows of each budget reproduce kvpress' semantics and stand
beside the peer's figures; the last ones are the defaults of this library, which the peer has no figures for.
"""

import argparse
import json
import time
from pathlib import Path

import jaxkv
from jaxkv import AdaKV, FullKV, PyramidKV, SnapKV, StreamingLLM
from jaxkv.policies import AvgPool, KVPressLayers, ProtectedHeads

NEEDLES = Path(__file__).parents[1] / "tests" / "golden" / "parity" / "needle1024.json"


def like_the_peer(budget):
    """Policies under kvpress' semantics, by the name the peer's figure has in the file."""

    def snap(kernel):
        return SnapKV(budget=budget, window=32, pooling=AvgPool(kernel))

    return {
        f"snap32@{budget}": snap(5),
        f"snap32k7@{budget}": snap(7),
        f"snap32k13@{budget}": snap(13),
        f"snap32k21@{budget}": snap(21),
        f"pyr20w8k13@{budget}": PyramidKV(
            budget=budget, window=8, pooling=AvgPool(13), allocation=KVPressLayers(beta=20.0)
        ),
        f"ada32@{budget}": AdaKV(base=snap(5), safeguard=ProtectedHeads(alpha=0.2)),
        f"ada32k13@{budget}": AdaKV(base=snap(13), safeguard=ProtectedHeads(alpha=0.2)),
        f"stream@{budget}": StreamingLLM(budget=budget),
    }


def defaults(budget):
    """The library's policies as they come."""
    return {
        f"SnapKV(budget={budget})": SnapKV(budget=budget),
        f"PyramidKV(budget={budget})": PyramidKV(budget=budget),
        f"AdaKV(budget={budget})": AdaKV(budget=budget),
        f"AdaKV(base=PyramidKV(budget={budget}))": AdaKV(base=PyramidKV(budget=budget)),
    }


def main():
    """Prints a line per policy as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to load (default: %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256], help="rows per head (default: 128 256)")
    options = parser.parse_args()
    needles = json.loads(NEEDLES.read_text("utf-8"))
    cases, peer = needles["cases"], needles["peer"]
    model = jaxkv.load(options.model)
    policies = {"full": FullKV()}
    for budget in options.budgets:
        policies |= like_the_peer(budget) | defaults(budget)
    print(f"{'policy':36s} {'jaxkv':>6s} {'kvpress':>8s} {'seconds':>8s}")
    for name, policy in policies.items():
        begin = time.perf_counter()
        out = jaxkv.generate(
            model,
            [case["input_ids"] for case in cases],
            policy=policy,
            max_new_tokens=needles["new_tokens"],
            stop_at_eos=False,
        )
        found = sum(case["answer"] in text for case, text in zip(cases, out.text, strict=True))
        theirs = str(peer[name][0]) if name in peer else "-"
        print(f"{name:36s} {found:6d} {theirs:>8s} {time.perf_counter() - begin:8.1f}", flush=True)


if __name__ == "__main__":
    main()
