"""Rejections of calls: what prefill, generate, sessions, samplers and plan_prefill say of prompts and options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from lettered import DOC, characters
from lettered import tiny as speaking
from refusing import calls, door
from test_implementations import chosen
from test_plan import EQUAL, WIDE
from test_prompts import CHAT
from transforming import ENTROPY, SNAP, draw

import jaxkv
from jaxkv import KNorm, PyramidKV, Sampling, Session, SnapKV
from jaxkv.engine.plan import plan_prefill
from jaxkv.text.prompts import encode_prompts

GQA = tiny.MODELS["gqa3"]

# --- prefill and generate ---------------------------------------------------------------------------------------------

# What both of them take.
OPTIONS = (
    (
        {"params": "smollm2"},
        TypeError,
        "params='smollm2'",
    ),
    ({"cache": object()}, TypeError, "cache=object: pass a cache from prefill"),
    *(({"max_new_tokens": new}, f"max_new_tokens={new}") for new in (0, 2.5)),
    ({"sampling": "greedy"}, TypeError, "sampling="),
    ({"sampling": Sampling()}, "key=None"),
    ({"stop": ["x", 5]}, TypeError, r"stop=\['x', 5\]"),
    ({"stop": ["x", ""]}, r"stop=\['x', ''\]"),
    ({"key": 1.5}, TypeError, "key=float"),
    ({"key": -1}, "key=-1"),
    ({"raw": "yes"}, "raw='yes'"),
    ({"stream": 1}, "stream=1"),
    ({"stream_interval": 0}, "stream_interval=0"),
    ({"stop_at_eos": None}, "stop_at_eos=None"),
    ({"progress": "no"}, "progress='no'"),
    ({"implementation": "fast"}, "implementation='fast'"),
)
# Arguments by other libraries' names.
WORDS = (
    ({"max_tokens": 4}, TypeError, "max_tokens"),
    ({"seed": 1, "key": 1}, TypeError, "seed"),
    ({"temperature": 0.7}, "key=None"),
    ({"temperature": 0.7, "sampling": Sampling()}, TypeError, "temperature"),
    ({"temperature": -1, "seed": 0}, "temperature="),
    ({"temperature": 1, "top_p": True}, "top_p="),
    ({"budget": 64}, TypeError, "budget"),
)
BOTH = {"params", "raw", "key", "progress", "implementation"}


def given(options):
    return {"params": speaking(), "prompt": DOC, **options}


def encoded(prompt, **options):
    return encode_prompts(prompt, characters(), speaking().config, close=True, **options)


def drawn_by(draw):
    prompt, key = tiny.prompts(0, (46,))[0], jax.random.key(0)
    return jaxkv.generate(
        speaking(), prompt, sampling=draw, key=key, stop_at_eos=False, max_new_tokens=12
    )


CALLS = [
    *door("generate", lambda options: jaxkv.generate(**given(options)), *OPTIONS),
    *door("generate by other names", lambda options: jaxkv.generate(**given(options)), *WORDS),
    *door(
        "prefill by other names",
        lambda options: jaxkv.prefill(**given(options)),
        ({"temperature": 1}, TypeError, "temperature"),
        ({"compression_ratio": 0.9}, TypeError, "compression_ratio"),
    ),
    *door(
        "prefill",
        lambda options: jaxkv.prefill(**given(options)),
        *(row for row in OPTIONS if {*row[0]} <= BOTH),
    ),
    *door(
        "a prompt",
        encoded,
        (
            b"Hello",
            TypeError,
            "prompt=bytes",
        ),
        (np.asarray(5), TypeError, "prompt=int"),
        (np.asarray([2**63 + 5], np.uint64), "token ids out of range"),
        (
            "half \ud83d a face",
            "^prompt=.*cannot encode",
        ),
    ),
    *calls(
        "a prompt that is raw",
        (
            lambda: encoded(CHAT, raw=True),
            "raw=True",
        ),
    ),
    *calls(
        "a sampler",
        (lambda: Sampling(temperature=-1.0), "temperature="),
        (lambda: Sampling(top_k=-2), "top_k="),
        (lambda: Sampling(top_p=0.0), "top_p="),
        (lambda: Sampling(min_p=-0.1), "min_p="),
        (lambda: Sampling(repetition_penalty=0.0), "repetition_penalty="),
        (lambda: Sampling(presence_penalty=2.1), "presence_penalty="),
        (lambda: Sampling(frequency_penalty=-2.1), "frequency_penalty="),
        (lambda: Sampling(logit_bias={-1: 1.0}), "logit_bias="),
        (lambda: Sampling(logit_bias={1: 101}), "logit_bias="),
        (lambda: Sampling(logit_bias=5), TypeError, "logit_bias=5: give a dict"),
        (lambda: Sampling(stop_token_ids=range(17)), "stop_token_ids="),
        (lambda: Sampling(stop_token_ids=tuple(range(17))), "at most 16"),
        (lambda: Sampling(logprobs=21), "logprobs="),
    ),
    *door(
        "a sampler of ones own",
        drawn_by,
        (lambda logits, keys: jnp.full(len(logits), 999, jnp.int32), r"outside of \[0, 96\)"),
        (
            lambda logits, keys: logits[:, 0],
            TypeError,
            r"returns float32\[1\]. Return one token id",
        ),
    ),
    *door(
        "an implementation",
        lambda of: chosen(of[0], **of[1]),
        (("pallas", {"platform": "tpu"}), "GPU"),
    ),
]

# --- plans and sessions -----------------------------------------------------------------------------------------------

MODEL = tiny.TWO_LAYERS
IDS, MORE = tiny.prompts(1, (37, 21)), tiny.prompts(2, (9, 4))
EMPTY = r"prompt=\[.*\]: not positive lengths"


@functools.cache
def prefilled(policy=SnapKV(budget=16, window=8)):  # noqa: B008  a value
    session = Session(tiny.tiny(MODEL), policy)
    return session, session.prefill(IDS)


def other() -> Session:
    """Of another model."""
    return Session(tiny.tiny(MODEL, seed=1), prefilled()[0].policy)


def extended(chunk):
    session, cache = prefilled(jaxkv.FullKV())
    session.extend(cache, MORE, chunk=chunk)


SESSIONS = [
    *door(
        "plan_prefill",
        lambda lengths: plan_prefill(WIDE, EQUAL, lengths),
        ([], EMPTY),
        ([5, 0], EMPTY),
    ),
    *door(
        "plan_prefill",
        lambda lengths: plan_prefill(GQA, "full", lengths),
        ([2.5], EMPTY),
    ),
    *door(
        "plan_prefill of a policy that the model cannot honour",
        lambda policy: plan_prefill(WIDE, policy, [100]),
        (jaxkv.OmniKV(filter_layers=(2, 40)), "filter_layers"),
        (jaxkv.BrutalOffload(resident_layers=40), "resident_layers=40"),
    ),
    *door(
        "a session",
        lambda call: call(*prefilled()),
        (
            lambda session, cache: session.sample(dataclasses.replace(cache, logits=None), 3),
            "without logits",
        ),
        (lambda session, cache: Session(session.params).sample(cache, 3), "policy=FullKV"),
        (lambda session, cache: other().extend(cache, MORE), "another model"),
        (lambda session, cache: session.sample(cache, 512), "the model was made for 512"),
        (lambda session, cache: session.extend(cache, [*MORE, [1]]), "3 prompts"),
        (lambda session, cache: session.sample(cache, 0), "steps=0"),
        (
            lambda session, cache: session.sample(cache, 3, eos=2),
            TypeError,
            "eos=2: give token ids",
        ),
    ),
    *door(
        "a session's chunks",
        extended,
        *((chunk, f"chunk={chunk}") for chunk in (0, True)),
    ),
]

# --- the transform ----------------------------------------------------------------------------------------------------


def call(policy=SNAP, **changed):
    k, v, q = draw()
    return jaxkv.compress(**({"k": k, "v": v, "queries": q, "policy": policy} | changed))


@functools.cache
def rows():
    return call(headroom=4)


def on_rows(use):
    """With entries, and k, v and q of two more tokens."""
    return use(rows(), *(each[:, :, :2] for each in draw(1)))


ARRAYS = [
    *door(
        "compress",
        lambda changed: call(**changed),
        *(
            (changed, f"^{told}")
            for changed, told in (
                ({"queries": None}, "queries=None: .*the last 8 queries"),
                ({"queries": jnp.zeros((2, 6, 4, 8))}, "queries='4 of 64 tokens'"),
                ({"queries": jnp.zeros((2, 5, 64, 8))}, r"queries=\[2, 5, 64, 8\]"),
                (
                    {"policy": jaxkv.H2O(budget=16, mode="prefill"), "queries": None},
                    "queries=None: .*all S queries",
                ),
                ({"policy": PyramidKV(budget=16)}, "layers=None"),
                ({"policy": ENTROPY, "layers": 3}, "policy=.*compress_layers"),
                ({"policy": SnapKV(budget=0.1, window=8, min_budget="raise")}, "budget=0.1"),
                ({"k": jnp.zeros((2, 64, 8))}, r"k=\[2, 64, 8\]: wrong shape: give \[B, K, S, D\]"),
                (
                    {"k": jnp.zeros((2, 2, 64, 8), jnp.int32)},
                    "k='int32': not floating point: give floating-point",
                ),
                (
                    {"length": jnp.asarray([64, 65])},
                    r"length=\[64, 65\]: out of range: give 0 to 64",
                ),
                ({"length": jnp.asarray([64.0, 3.0])}, r"length='float32\[2\]'"),
                ({"headroom": -1}, "headroom=-1"),
            )
        ),
        (
            {"k": jnp.full((2, 2, 64, 8), jnp.nan), "policy": KNorm(budget=8), "layer": 2},
            r"^scores='NaN': .*layers \[2\]",
        ),
    ),
    *door(
        "append",
        on_rows,
        (
            lambda rows, k, v, q: rows.append(k[:, :1], v[:, :1]),
            r"^k=\[2, 1, 2, 8\]: wrong shape: give",
        ),
        (
            lambda rows, k, v, q: rows.append(*(x.astype(jnp.bfloat16) for x in (k, v))),
            "^k='bfloat16': ",
        ),
        (
            lambda rows, k, v, q: rows.append(k, v, count=jnp.asarray([3, 0])),
            r"^count=\[3, 0\]",
        ),
    ),
    *door(
        "attend",
        on_rows,
        (
            lambda rows, k, v, q: rows.attend(q, layer=1),
            "^layer=1: give an index from 0 to 0",
        ),
        (lambda rows, k, v, q: rows.attend(q[:1]), r"^q=\[1, 6, 2, 8\]: "),
    ),
    *door(
        "step",
        on_rows,
        (lambda rows, k, v, q: rows.step(q[:1], k, v), r"^q=\[1, 6, 2, 8\]: "),
        (lambda rows, k, v, q: rows.step(q[:, :, :1], k, v), r"^q='1 tokens': k has 2"),
        (lambda rows, k, v, q: rows.step(q, k[:, :1], v[:, :1]), r"^k=\[2, 1, 2, 8\]: "),
    ),
    *door(
        "compress_layers",
        lambda use: use(*draw(1)),
        (lambda k, v, q: jaxkv.compress_layers([k], [v, v], policy=KNorm), "^v='2 layers'"),
        (
            lambda k, v, q: jaxkv.compress_layers([k, k[:, :, :8]], [v, v[:, :, :8]], policy=KNorm),
            r"^k='float32\[2, 2, 8, 8\]'",
        ),
    ),
]

ROWS = [*CALLS, *SESSIONS, *ARRAYS]
