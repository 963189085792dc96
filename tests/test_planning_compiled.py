"""What is asked of the compiler: a prefill's programs and what is beside them, as the engine really calls them."""

import dataclasses
import functools
import subprocess

import jax
import pytest
import tiny

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.models.values import LayerSpec, NoRope
from jaxkv.planning import compiled
from jaxkv.planning.gpus import gpus
from jaxkv.planning.setting import Workload
from jaxkv.planning.tpus import tpus
from jaxkv.planning.traced_programs import SMALL, TraceInputs, build_abstract_model
from jaxkv.sharding.record import count_device_bytes
from jaxkv.sharding.sharded_program import ShardedProgram

SHAPE = tiny.shape(layers=3, kv_heads=2, group=2, dim=8)
BATCH, TOKENS, NEW, BUDGET = 2, 64, 8, 40
# Programs that are given weights, as the first of their arguments.
WEIGHTED = {"embed_tokens", "layer", "compute_logits"}
POLICIES = {
    "full": jaxkv.FullKV(),
    "adakv": jaxkv.AdaKV(budget=BUDGET),
    "h2o": jaxkv.H2O(budget=BUDGET),
    "d2o": jaxkv.D2O(budget=BUDGET),
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=BUDGET)),
    "criticalkv": jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=BUDGET)),
}


class Called:
    """Programs called: their names, the shapes that they are given, and the bytes that lie there besides."""

    def __init__(self, monkeypatch):
        self.calls, self.run = list[tuple[str, list, int]](), ShardedProgram.__call__
        self.before = set(self.live())
        monkeypatch.setattr(
            ShardedProgram, "__call__", lambda door, *args, **more: self.called(door, args, more)
        )

    @staticmethod
    def live() -> dict[int, int]:
        """Bytes of what lies there, by address; arrays of several devices are left by other tests and have no one."""
        lying = [
            each for each in jax.live_arrays() if not each.is_deleted() and len(each.devices()) == 1
        ]
        return {each.unsafe_buffer_pointer(): each.nbytes for each in lying}

    def called(self, door: ShardedProgram, args, more):
        there = {at: size for at, size in self.live().items() if at not in self.before}
        for leaf in jax.tree.leaves(args):
            if isinstance(leaf, jax.Array):
                there.pop(leaf.unsafe_buffer_pointer(), None)
        self.calls.append(
            (door.__name__, [leaf.shape for leaf in jax.tree.leaves(args)], sum(there.values()))
        )
        return self.run(door, *args, **more)


def work_of(policy, shape=SHAPE) -> TraceInputs:
    given = {"policy": policy, "batch": BATCH, "tokens": TOKENS, "new": NEW}
    return TraceInputs(
        flat=build_abstract_model(shape, "float32"), implementation=Implementation.XLA, **given
    )


@functools.cache
def calls_of(name) -> list[tuple[str, list, int]]:
    """What a real prefill calls."""
    session, ids = (
        jaxkv.Session(tiny.tiny(SHAPE), POLICIES[name]),
        tiny.prompts(0, [TOKENS] * BATCH),
    )
    session.prefill(ids, new=NEW)
    with pytest.MonkeyPatch.context() as patched:
        real = Called(patched)
        session.prefill(ids, new=NEW)
    return real.calls


def check_record(name):
    """Every call of a real prefill is recorded, in order, with the same shapes; and what is beside it."""
    work, happened = work_of(POLICIES[name]), calls_of(name)
    recorded, weights = (
        work.traced_prefill.calls,
        count_device_bytes((work.flat.ends, work.flat.blocks)),
    )
    assert len(recorded) == len(happened)
    for call, (program, shapes, beside) in zip(recorded, happened, strict=True):
        assert (call.name, [leaf.shape for leaf in jax.tree.leaves(call.arguments)]) == (
            program,
            shapes,
        )
        resident = weights - count_device_bytes(call.arguments[0] if call.name in WEIGHTED else ())
        close = pytest.approx(beside, rel=0.02, abs=500)
        # A program of numbers is called while what was observed is still at hand.
        assert program in SMALL or call.beside - resident == close, program


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefill_calls_what_is_recorded(name, as_users_call):
    check_record(name)


@pytest.mark.usefixtures("as_users_call")
def test_layers_of_two_rotations_are_recorded():
    kinds = (LayerSpec(), LayerSpec(rope=NoRope()))
    work, plain = (
        work_of(POLICIES["adakv"], dataclasses.replace(SHAPE, kinds=kinds)),
        work_of(POLICIES["adakv"]),
    )
    names, those = ([call.name for call in each.traced_prefill.calls] for each in (work, plain))
    assert names == those and names.count("layer") == 3


def test_what_is_missing_is_said(monkeypatch):
    setting = Workload(
        model="tiny", config=SHAPE, policy=jaxkv.FullKV(), gpu=gpus()["h100"], context=TOKENS
    )
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    for kind in (gpus()["h100"], tpus()["v6e"]):
        with pytest.raises(ImportError, match="pip install "):
            compiled.compile_plan(dataclasses.replace(setting, gpu=kind))
    monkeypatch.setattr(compiled, "require_compiler_plugin", lambda gpu: "1.0")
    for options in ({"prefill_ratio": 4}, {"offload": True}):
        policy = jaxkv.OmniKV(budget=BUDGET, filter_layers=(0,), **options)
        with pytest.raises(ValueError, match="^policy="):
            compiled.compile_plan(dataclasses.replace(setting, policy=policy))


@pytest.mark.parametrize("kind", ["h100", "v6e"])
def test_libtpu_is_opened_beside_another_process(monkeypatch, kind):
    """A plan for TPUs neither waits for libtpu's lock nor asks for a TPU; one for GPUs sets no such variable."""
    known = {**gpus(), **tpus()}
    setting = Workload(
        model="tiny", config=SHAPE, policy=jaxkv.FullKV(), gpu=known[kind], context=TOKENS
    )
    asked = []

    def run(command, *, stdout, env, **options):
        asked.append(env)
        stdout.write(b"no word of it")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    monkeypatch.setattr(compiled, "require_compiler_plugin", lambda gpu: "1.0")
    monkeypatch.setattr(compiled.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="no word of it"):
        compiled.compile_plan(setting)
    expected = ("1", "cpu") if kind == "v6e" else (None, None)
    assert (asked[0].get("ALLOW_MULTIPLE_LIBTPU_LOAD"), asked[0].get("JAX_PLATFORMS")) == expected
