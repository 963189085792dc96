"""What tests on meshes share: models, prompts, runs with and without a mesh, and what travelled in their programs."""

import functools
import re
from typing import NamedTuple

import jax
import numpy as np
import tiny
from policy_table import BY_NAME

import jaxkv

BUDGET, NEW, LAYERS, DIM = 24, 6, 2, 10
LENGTHS = (61, 37, 50, 44, 29, 58, 33, 47)


def mesh_of(data: int, model: int):
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])


@functools.cache
def model_of(kv_heads: int, group: int = 2):
    """A tiny model; no other axis of it, or of prompts and pools, has as many numbers as a head."""
    return tiny.tiny(tiny.shape(layers=LAYERS, kv_heads=kv_heads, group=group, dim=DIM))


def prompts(seed: int, lengths):
    """Token ids none of which comes twice: rows of one token tie, and are told apart by rounding alone."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(tiny.VOCAB)[:length].tolist() for length in lengths]


def positions(cache):
    return {part[:3]: sorted(part.pos.tolist()) for part in tiny.segments(cache)}


class Ran(NamedTuple):
    """Tokens drawn, and what was kept behind the prompts and behind the answers."""

    tokens: list
    prompts: dict
    answers: dict


def ran(model, policy) -> Ran:
    """Prompts are read, and tokens drawn."""
    session = jaxkv.Session(model, policy, key=3)
    cache = session.prefill(prompts(5, LENGTHS), new=NEW)
    kept = positions(cache)
    cache, tokens = session.draw(cache, NEW, donate=True)
    read_programs()
    return Ran(tokens.tolist(), kept, positions(cache))


@functools.cache
def run(name: str, kv_heads: int, group: int = 2, *, mesh: tuple[int, int] | None = None, every: int | None = None):
    """`ran` for a row of the policy table, once."""
    policy = BY_NAME[name].make(BUDGET, **({} if every is None else {"every": every}))
    of = model_of(kv_heads, group)
    return ran(of if mesh is None else of.on(mesh_of(*mesh)), policy)


class Sent(NamedTuple):
    """One collective of a compiled program."""

    program: str
    kind: str
    shape: tuple[int, ...]


_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
_COLLECTIVE = re.compile(rf"= \(?(.*?) ({_KINDS})(?:-start)?\(")
SENT: set[Sent] = set()
NAMES: set[str] = set()
_read: set[bytes] = set()


def read_programs() -> None:
    """Reads what the programs send that have been compiled for several devices since the last call."""
    for each in jax.devices()[0].client.live_executables():
        if each.fingerprint in _read or len(each.local_devices()) == 1:
            continue
        _read.add(each.fingerprint)
        for module in each.hlo_modules():
            NAMES.add(module.name)
            for shapes, kind in _COLLECTIVE.findall(module.to_string()):
                for shape in re.findall(r"\[([\d,]*)\]", shapes):
                    SENT.add(Sent(module.name, kind, tuple(int(n) for n in shape.split(",") if n)))
