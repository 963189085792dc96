"""2StageRetr on the real model: how many answers survive at 30% of the cache, and how much attention stays visible.

    python -m benchmarks.two_stage                    34 cases
    python -m benchmarks.two_stage --cases 6

Cases are answered at once, after reasoning, and twice with words put into the model's mouth, which leave less and less
of the second stage: "Since 8 + 10 = 18, the corresponding color is", and the entry itself begun, "18:".

A small model fails many cases under full attention already. So besides, every policy's visible rows are held against
full attention: the tokens that FullKV drew are fed to each policy, and at each of them the figure is the share of full
attention's probability, averaged over layers and query heads, that falls on rows which the policy can see there.

OmniKV stands there twice: by the paper's Mem%, where layers that read everything use up most of the 30%; and with 30%
of the prompt's tokens read by every other layer, as many as those keep which drop the rest.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.cache import repack
from jaxkv.cache.pools import Pool
from jaxkv.engine.compilation import enable_compilation_cache
from jaxkv.engine.filters import asking, choose
from jaxkv.engine.plan import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.evals import two_stage
from jaxkv.policies.reading import WHOLE

MODEL = "smollm2-135m-instruct"
SHARE = 0.3
POLICIES = {
    "FullKV": jaxkv.FullKV(),
    "OmniKV, Mem": jaxkv.OmniKV(mem=SHARE),
    "OmniKV, tokens": jaxkv.OmniKV(budget=SHARE),
    "H2O": jaxkv.H2O(budget=SHARE),
    "SnapKV": jaxkv.SnapKV(budget=SHARE),
    "StreamingLLM": jaxkv.StreamingLLM(budget=SHARE),
}


# Way of asking: whether to ask for reasoning, and the answer's first words.
WAYS = {
    "at once": (False, ""),
    "after reasoning": (True, ""),
    "the sum given": (False, "Since {sum} = {key}, the corresponding color is"),
    "the entry begun": (False, "Since {sum} = {key}, the entry of the dictionary is {key}:"),
}


def ids_of(model, case, said=""):
    """A case as the model sees it, with the answer's first words."""
    text = model.text.chat([{"role": "user", "content": case.prompt}], generation_prompt=True)
    addition = case.prompt.split("equation is ")[1].split(" =")[0]
    return model.text.encode(text + said.format(sum=addition, key=case.key), bos=False)


def answered(model, cases, policy, new, batch, said):
    """Whether each answer is right, and the ids drawn."""
    right, drawn = [], []
    for first in range(0, len(cases), batch):
        part = cases[first : first + batch]
        prompts = [ids_of(model, case, said) for case in part]
        out = jaxkv.generate(model, prompts, policy=policy, max_new_tokens=new, progress=False)
        right += [case.found_in(text) for case, text in zip(part, out.text, strict=True)]
        drawn += [tokens.tolist() for tokens in out.tokens]
    return right, drawn


def full_attention(flat, ids, steps):
    """Queries, keys and probabilities `[L]` of the last tokens, under full attention."""
    slots = bucket(len(ids))
    tokens = np.zeros((1, slots), np.int32)
    tokens[0, : len(ids)] = ids
    layers = read_layers(flat, jnp.asarray(tokens), jnp.asarray([len(ids)], jnp.int32), queries=steps)
    return [(q, k, np.asarray(_shares(q, k, at))) for q, k, at in layers]


@jax.jit
def _shares(q, k, positions):
    logits = jnp.einsum("kgwd,ksd->wkgs", q[0], k[0], preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[2], dtype=jnp.int32) <= positions[0][:, None]
    return jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e30), axis=-1)


def chosen_shares(policy, layers, prompt, steps):
    """By step: OmniKV's figure, its filters choosing by full attention's queries."""
    reading = policy.parts().reading(len(layers), bucket(prompt))
    budget = jnp.asarray(policy.parts().read.tokens(np.asarray([prompt]), len(layers)), jnp.int32)
    number = lambda n: jnp.asarray([n], jnp.int32)  # noqa: E731
    figures = []
    for step in range(steps):
        now, carried = prompt + step, []
        chosen = {}
        for layer in reading.filters:
            q, k, _ = layers[layer]
            pool = Pool(
                k=k.reshape(1, -1, k.shape[-1]), v=k.reshape(1, -1, k.shape[-1]), pos=jnp.zeros((1, 0), jnp.int32)
            )
            asked = asking(q[:, :, :, step : step + 1], None, number(now)[None], number(1), reading)
            none = jnp.zeros((1, k.shape[1]), jnp.int32)
            found = choose(asked, pool, none, none, number(prompt), budget, number(now), reading, windowed=True)
            chosen[layer] = np.asarray(found.positions)[0, : int(found.count[0])]
        for layer, source in enumerate(reading.sources):
            shares = layers[layer][2][step]
            visible = np.ones(shares.shape[-1], bool)
            if source != WHOLE:
                visible[:prompt] = False
                visible[chosen[source]] = True
            carried.append(shares[..., visible].sum(axis=-1).mean())
        figures.append(float(np.mean(carried)))
    return figures


def kept_shares(model, policy, ids, prompt, layers):
    """By step: the figure of a policy that drops rows, as its cache stands when the token is drawn."""
    cache = jaxkv.prefill(model, ids[:prompt], policy=policy)
    copy = repack(cache, room=len(ids) - prompt)
    session, figures = jaxkv.Session(model, cache.policy), []
    for step, token in enumerate(ids[prompt:]):
        pos, start, length = [np.asarray(pool.pos)[0] for pool in copy.pools], np.asarray(copy.start), copy.length
        carried = []
        for layer, (_, _, shares) in enumerate(layers):
            rows = pos[cache.layout.pool_of(layer)]
            for head in range(start.shape[2]):
                first = start[layer, 0, head]
                held = rows[first : first + int(length[layer, 0, head])]
                # The token itself is visible to itself.
                visible = np.append(held, prompt + step)
                carried.append(shares[step, head][:, visible].sum(axis=-1).mean())
        figures.append(float(np.mean(carried)))
        copy = session.extend(copy, [token], chunk=1, donate=True)
    return figures


def visible(model, cases, drawn, steps):
    """Every policy's figures, step by step, over some cases."""
    flat = model.flat
    found = {name: [] for name in POLICIES if name != "FullKV"}
    for case, answer in zip(cases, drawn, strict=True):
        ids = ids_of(model, case)
        after = answer[:steps]
        layers = full_attention(flat, ids + after, len(after))
        for name in found:
            policy = POLICIES[name].for_model(model.config.layers, model.filter_layers)
            if isinstance(policy, jaxkv.OmniKV):
                found[name].append(chosen_shares(policy, layers, len(ids), len(after)))
            else:
                found[name].append(kept_shares(model, policy, ids + after, len(ids), layers))
    # An answer may end early: steps of all cases, one after the other.
    return {name: np.concatenate(figures) for name, figures in found.items()}


def main():
    """Answers, judges, saves and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=34)
    parser.add_argument("--batch", type=int, default=17)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--seen-cases", type=int, default=8, help="cases whose visible attention is measured")
    parser.add_argument("--steps", type=int, default=16, help="tokens at which it is")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "two_stage.json")
    options = parser.parse_args()
    enable_compilation_cache()
    model = jaxkv.load(MODEL)
    settings = {"model": model.name, "share": SHARE, "cases": options.cases, "new_tokens": options.new_tokens}
    results = record.resume(options.out, settings | {"filters": model.filter_layers})
    drawn = {}
    for name, (reason, said) in WAYS.items():
        cases, new = two_stage(options.cases, reason=reason), 8 if said else options.new_tokens
        table = results.setdefault("right", {}).setdefault(name, {})
        for policy_name, policy in POLICIES.items():
            right, ids = answered(model, cases, policy, new, options.batch, said)
            table[policy_name] = {"right": sum(right), "of": len(right), "policy": repr(policy)}
            drawn[name] = ids if policy_name == "FullKV" else drawn[name]
            record.save(options.out, results)
            print(f"{name}: {policy_name} {sum(right)} of {len(right)}", flush=True)
    # Dictionaries of every size, not only the first ones.
    every = max(1, options.cases // options.seen_cases)
    figures = visible(model, two_stage(options.cases)[::every], drawn["at once"][::every], options.steps)
    results["visible"] = {
        name: {"mean": float(each.mean()), "least": float(each.min()), "steps": len(each)}
        for name, each in figures.items()
    }
    highest = sorted(figures, key=lambda name: -figures[name].mean())
    others = np.stack([each for name, each in figures.items() if not name.startswith("OmniKV")]).max(axis=0)
    wins = {name: float((figures[name] >= others).mean()) for name in figures if name.startswith("OmniKV")}
    results["above_all_others_at"] = wins
    results["machine"] = record.machine()
    record.save(options.out, results)
    for name in highest:
        print(f"{name:14} visible attention {figures[name].mean():.4f}, least {figures[name].min():.4f}")
    for name, share in wins.items():
        print(f"{name}: above H2O, SnapKV and StreamingLLM at {share:.1%} of steps")
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
