"""What tests on meshes share: models, prompts, runs with and without a mesh, and what travelled in their programs."""

import dataclasses
import functools
import gc
import re
from typing import NamedTuple
from unittest import mock

import compiling
import jax
import numpy as np
import tiny
from policy_table import BY_NAME, TABLE

import jaxkv
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.plan import plan_prefill
from jaxkv.sharding import mesh as placing

BUDGET, NEW, LAYERS, DIM = 24, 6, 2, 10
LENGTHS, QUESTIONS = (61, 37, 50, 44, 29, 58, 33, 47), (5, 9, 3, 8, 6, 2, 7, 4)


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


def roomy(name: str, **options):
    """A row's policy whose heads may all go to one device: what no device has room for is another test's."""
    policy = BY_NAME[name].make(BUDGET, **options)
    if not hasattr(policy, "capacity"):
        return policy
    if getattr(policy, "heads", None) is None:
        return dataclasses.replace(policy, capacity=8.0)
    return dataclasses.replace(policy, heads=dataclasses.replace(policy.heads, capacity=8.0))


def positions(cache):
    return {part[:3]: sorted(part.pos.tolist()) for part in tiny.segments(cache)}


def kind(row):
    """What makes programs differ: how segments lie, what follows the prompt, whether rows are merged, or chosen."""
    parts = row.policy(BUDGET).build_policy_parts()
    return parts.cache_layout, type(parts.after), bool(parts.merge), bool(parts.read)


def one_of_each(rows) -> tuple[str, ...]:
    """Names of rows, the last one of each kind: those at the end of the table are made of more parts."""
    return tuple({kind(row): row.name for row in rows}.values())


KINDS = one_of_each(TABLE)


def answers(model, policy, ids, folder=None):
    """Tokens, and positions kept behind prompts and behind answers; a cache saved in `folder` gives the same tokens."""
    session = jaxkv.Session(model, policy)
    cache = session.prefill(ids, new=NEW)
    if folder is not None:
        cache.save(folder)
    asked, tokens = session.sample(cache, NEW)
    if folder is not None:
        loaded = jaxkv.load_cache(folder, model, policy=policy)
        assert session.sample(loaded, NEW)[1].tolist() == tokens.tolist()
    return tokens.tolist(), positions(cache), positions(asked)


class Ran(NamedTuple):
    """Tokens sampled, and what was kept behind the prompts and behind the answers."""

    tokens: list
    prompts: dict
    answers: dict


def check_planned(session, cache) -> None:
    """What the first device holds of a cache weighs what was planned for one device of such a mesh."""
    axes_of, config = session.params.axes, session.params.config
    headroom = compute_prefill_headroom(
        session.policy.build_policy_parts(), config.sliding_windows, np.asarray(LENGTHS), NEW
    )
    mesh = None if axes_of is None else axes_of.mesh
    planned = plan_prefill(
        config, session.policy, LENGTHS, dtype=session.params.dtype, headroom=headroom, mesh=mesh
    )
    leaves = jax.tree.leaves(
        dataclasses.replace(cache, host_store=None, logits=None, tally=type(cache.tally)())
    )
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) == planned.cache_bytes
    waiting = (
        0
        if cache.host_store is None
        else sum(each.addressable_shards[0].data.nbytes for each in cache.host_store.rows)
    )
    assert waiting == planned.host_bytes


def ran(model, policy, *, asks: bool = False) -> Ran:
    """Prompts are read, questions on top of them, and tokens sampled; notes what arrays have to move on a mesh."""
    with mock.patch.object(placing, "move_to_sharding", watched):
        session = jaxkv.Session(model, policy, key=3)
        cache = session.prefill(prompts(5, LENGTHS), new=NEW)
        check_planned(session, cache)
        kept = positions(cache)
        if asks:
            cache = session.extend(cache, prompts(6, QUESTIONS), new=NEW)
        cache, tokens = session.sample(cache, NEW, donate=True)
    return Ran(tokens.tolist(), kept, positions(cache))


@functools.cache
def run(
    name: str,
    kv_heads: int,
    group: int = 2,
    *,
    mesh: tuple[int, int] | None = None,
    asks=False,
    **options,
):
    """`ran` for a row of the policy table, once; a look into the programs follows those of a mesh."""
    policy = roomy(name, **options)
    of = model_of(kv_heads, group)
    if mesh is None:
        return ran(of, policy, asks=asks)
    out = ran(of.on(mesh_of(*mesh)), policy, asks=asks)
    read_programs(mesh)
    return out


def check_row(row, kv_heads: int, **of) -> None:
    """A policy that is no row of the table answers on a mesh as on one device."""
    with mock.patch.dict(BY_NAME, {row.name: row}):
        run.cache_clear()
        assert run(row.name, kv_heads, mesh=(2, 4), **of) == run(row.name, kv_heads, **of)
        run.cache_clear()


class Compiled(NamedTuple):
    """What a program for several devices does besides computing.

    Attributes:
        name: its function's.
        mesh: that it was compiled for.
        sent: kinds and shapes of its collectives.
        copied: rows of heads, `[B, P, D]`, that it copies whole.
        fresh: such rows that it is given and does not write where they are.
    """

    name: str
    mesh: tuple[int, int]
    sent: tuple[tuple[str, tuple[int, ...]], ...]
    copied: int
    fresh: int


_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
_COLLECTIVE = re.compile(rf"= \(?(.*?) ({_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"[a-z]+\d*\[([\d,]*)\]")
COMPILED: list[Compiled] = []
# Arrays of a mesh that a program was given elsewhere than where it wants them: shapes.
MOVED: set[tuple[int, ...]] = set()
_read: set[bytes] = set()
# Executables of earlier files that something still holds. Equal programs compiled anew have the same fingerprint.
_older: list = []


def shapes(text: str) -> list[tuple[int, ...]]:
    """Of all arrays in some of a program's text."""
    return [tuple(int(n) for n in each.split(",") if n) for each in _SHAPE.findall(text)]


def forget() -> None:
    """Clears what earlier files ran on meshes, and their programs: those of other models and lengths count no more."""
    run.cache_clear()
    model_of.cache_clear()
    # A model keeps its copies on meshes, whose making is looked at, too.
    tiny.tiny.cache_clear()
    compiling.forget()
    jax.clear_caches()
    gc.collect()
    for kept in (COMPILED, MOVED, _read):
        kept.clear()
    _older[:] = jax.devices()[0].client.live_executables()


def read_programs(mesh: tuple[int, int]) -> None:
    """Looks into the programs for several devices that have been compiled since the last call."""
    COMPILED.extend(new_programs(mesh))


def new_programs(mesh: tuple[int, int]) -> list[Compiled]:
    """Those programs, for who keeps them himself."""
    fresh = [
        each
        for each in jax.devices()[0].client.live_executables()
        if each.fingerprint not in _read
        and len(each.local_devices()) > 1
        and not any(each is old for old in _older)
    ]
    _read.update(each.fingerprint for each in fresh)
    return [
        compiled(module.name, mesh, module.to_string())
        for each in fresh
        for module in each.hlo_modules()
    ]


def compiled(name: str, mesh: tuple[int, int], text: str) -> Compiled:
    """What a program's text says."""
    head, _, body = text.partition("\n")
    of_heads = lambda shape: len(shape) == 3 and shape[-1] == DIM  # noqa: E731
    sent = [(kind, shape) for found, kind in _COLLECTIVE.findall(body) for shape in shapes(found)]
    copied = [
        shape
        for found in re.findall(r"= (.*?) copy\(", body)
        for shape in shapes(found)
        if of_heads(shape)
    ]
    given = shapes(
        re.sub(r"/\*.*?\*/", "", head)
        .partition("entry_computation_layout={(")[2]
        .partition(")->")[0]
    )
    written = {int(at) for at in re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", head)}
    fresh = [at for at, shape in enumerate(given) if of_heads(shape) and at not in written]
    return Compiled(name.removeprefix("jit_"), mesh, tuple(sent), len(copied), len(fresh))


_put = placing.move_to_sharding


def watched(leaf, there):
    """`put` of jaxkv.sharding.mesh, which notes what has to move from device to device."""
    on_mesh = (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and len(leaf.devices()) > 1
    )
    if on_mesh and leaf.size and not leaf.sharding.is_equivalent_to(there, leaf.ndim):
        MOVED.add(leaf.shape)
    return _put(leaf, there)
