"""Caches on disk: what comes back, in which process, and what is rejected."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
import tiny
from policy_table import TABLE

import jaxkv
from jaxkv import D2O, AdaKV, BrutalOffload, CustomPolicy, OmniKV, Refit, SnapKV, StreamingLLM
from jaxkv.cache.encoding import decode_from_json, encode_as_json
from jaxkv.policies import Scorer

ROOT = Path(__file__).parent.parent
CONFIG = tiny.TWO_LAYERS
SNAP = SnapKV(budget=20, window=8)
# Every form of pool, every leaf that a cache may have, what goes on after the prompt, and rows in host memory.
CASES = {
    "ragged, refit": Refit(base=AdaKV(base=SNAP)),
    "shared, scored and merged": D2O(budget=20),
    "chosen again": SnapKV(budget=20, window=8, every=4),
    "rolling": StreamingLLM(budget=20),
    "in host memory": OmniKV(budget=8, filter_layers=(0,), adjacent=0, offload=True),
}


@dataclasses.dataclass(frozen=True)
class Late(Scorer):
    """A user's scorer."""

    weight: float = 1.0

    def score_entries(self, seen):
        position = jnp.arange(seen.k.shape[2], dtype=jnp.float32)
        return jnp.broadcast_to(self.weight * position, seen.k.shape[:3])


@dataclasses.dataclass(frozen=True, eq=False)
class Learned(Scorer):
    """A user's scorer with a weight for each position."""

    weight: np.ndarray

    def score_entries(self, seen):
        return jnp.broadcast_to(jnp.asarray(self.weight)[: seen.k.shape[2]], seen.k.shape[:3])


def assert_same(cache, other):
    """Bit by bit, and everything that is no array."""
    mine, theirs = jax.tree.flatten(cache), jax.tree.flatten(other)
    assert mine[1] == theirs[1]
    for one, two in zip(mine[0], theirs[0], strict=True):
        assert (one.dtype, one.shape, one.sharding) == (two.dtype, two.shape, two.sharding)
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def answer(model, cache, **asked):
    out = jaxkv.generate(model, tiny.prompts(7, (5, 3)), cache=cache, max_new_tokens=6, **asked)
    return [each.tokens for each in out]


def saved(tmp_path, policy=SNAP):
    """A model, a cache of two prompts, and where it lies."""
    model = tiny.tiny(CONFIG)
    cache = jaxkv.prefill(model, tiny.prompts(1, (40, 25)), policy=policy)
    cache.save(tmp_path / "cache")
    return model, cache, tmp_path / "cache"


@pytest.mark.parametrize("name", CASES)
def test_a_cache_comes_back_and_goes_on(tmp_path, name):
    model, cache, path = saved(tmp_path, CASES[name])
    loaded = jaxkv.load_cache(path, model)
    assert_same(loaded, cache)
    assert loaded.nbytes == cache.nbytes and loaded.host_nbytes == cache.host_nbytes
    assert (loaded.host_nbytes > 0) == (name == "in host memory")
    np.testing.assert_array_equal(answer(model, loaded), answer(model, cache))
    assert sorted(each.name for each in path.iterdir()) == ["arrays", "jaxkv.json"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_policy_comes_back(row):
    for budget in (24, 0.25):
        policy, arrays = row.policy(budget), {}
        back = decode_from_json(json.loads(json.dumps(encode_as_json(policy, arrays))), arrays.get)
        assert (
            type(back) is type(policy)
            and back == policy
            and repr(back) == repr(policy)
            and not arrays
        )


def test_a_fresh_process_answers_with_the_same_tokens(tmp_path):
    folder = running.GOLDEN / "models" / "llama_gqa"
    model, ids = jaxkv.load(folder), [[5, 6, 7, 8] * 8, [3, 4, 9] * 5]
    cache = jaxkv.prefill(model, ids, policy=AdaKV(base=SnapKV(budget=10, window=4)))
    cache.save(tmp_path / "cache")
    code = (
        "import json, sys, jaxkv\n"
        "model = jaxkv.load(sys.argv[1])\n"
        "cache = jaxkv.load_cache(sys.argv[2], model)\n"
        "out = jaxkv.generate(model, [[1, 2], [3]], cache=cache, max_new_tokens=8, stop_at_eos=False)\n"
        "print(json.dumps([each.tokens.tolist() for each in out]))\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "cache")]
    out = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    expected = jaxkv.generate(
        model, [[1, 2], [3]], cache=cache, max_new_tokens=8, stop_at_eos=False
    )
    assert json.loads(out.stdout) == [each.tokens.tolist() for each in expected]


# --- policies of users ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_users_call")
def test_a_users_policy(tmp_path, monkeypatch):
    policy = CustomPolicy(budget=20, scorer=Late(weight=2.0))
    _, cache, path = saved(tmp_path, policy)
    assert_same(jaxkv.load_cache(path), cache)
    assert_same(
        jaxkv.load_cache(path, policy=CustomPolicy(budget=20, scorer=Late(weight=2.0))), cache
    )
    remedy = "another policy compressed the cache: omit it, or pass that one"
    for other in (CustomPolicy(budget=20, scorer=Late()), "snapkv"):
        with pytest.raises(ValueError, match=remedy):
            jaxkv.load_cache(path, policy=other)
    with pytest.raises(TypeError, match="policy=int: give a policy such as"):
        jaxkv.load_cache(path, policy=3)
    # In a process that does not have the class by this name.
    monkeypatch.delattr(sys.modules[__name__], "Late")
    remedy = (
        r"class='.*:Late': not in this process: import its module first, or pass .*policy=\.\.\."
    )
    with pytest.raises(ValueError, match=remedy):
        jaxkv.load_cache(path)
    assert_same(jaxkv.load_cache(path, policy=policy), cache)


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize("policy", [OmniKV(budget=8, adjacent=0, base=SNAP), "snapkv"])
def test_the_policy_as_prefill_was_given_it(tmp_path, policy):
    """Filled in by the model, by its name or class."""
    model = tiny.tiny(CONFIG)
    model.filter_layers = (0,)
    cache = jaxkv.prefill(model, tiny.prompts(1, (40, 25)), policy=policy)
    cache.save(tmp_path / "cache")
    for asked in ({}, {"params": model}):
        assert_same(jaxkv.load_cache(tmp_path / "cache", policy=policy, **asked), cache)
    for other in (OmniKV(budget=8, adjacent=0, filter_layers=(1,)), BrutalOffload(), "h2o"):
        with pytest.raises(ValueError, match="policy=.*another policy compressed the cache"):
            jaxkv.load_cache(tmp_path / "cache", policy=other)


def test_policies_that_no_text_says(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Odd(Late):
        how: object = len

    model = tiny.tiny(CONFIG)
    cache = jaxkv.prefill(
        model, tiny.prompts(1, (40,)), policy=CustomPolicy(budget=20, scorer=Odd())
    )
    with pytest.raises(ValueError, match=r"policy\.scorer\.how="):
        cache.save(tmp_path / "cache")
    # Numbers in arrays would come back as nothing at all.
    policy = CustomPolicy(budget=20, scorer=Learned(weight=np.ones(512, np.float32)))
    cache = jaxkv.prefill(model, tiny.prompts(1, (40,)), policy=policy)
    with pytest.raises(ValueError, match=r"policy\.scorer\.weight="):
        cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_and_nothing_but_values_is_made(monkeypatch):
    taken = types.ModuleType("taken")
    taken.Loose = dataclasses.make_dataclass("Loose", ["x"])
    monkeypatch.setitem(sys.modules, "taken", taken)
    for path in ("antigravity:Thing", "os:system"):
        with pytest.raises(ValueError, match="not in this process"):
            decode_from_json({"class": path, "fields": {}}, lambda name: None)
    assert "antigravity" not in sys.modules
    for path in ("taken:Loose", "builtins:int"):
        with pytest.raises(ValueError, match="not a frozen dataclass"):
            decode_from_json({"class": path, "fields": {}}, lambda name: None)
    with pytest.raises(ValueError, match="its fields differ in this version"):
        decode_from_json({"class": "jaxkv:SnapKV", "fields": {"sprockets": 3}}, lambda name: None)
    with pytest.raises(ValueError, match="has no such member in this version"):
        decode_from_json(
            {"enum": "jaxkv.cache:ConversationState", "member": "NOON"}, lambda name: None
        )


# --- what is rejected ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_users_call")
def test_a_cache_of_another_model(tmp_path):
    _, _, path = saved(tmp_path)
    other = tiny.tiny(CONFIG, seed=1)
    with pytest.raises(ValueError, match="the cache belongs to another model than 'tiny-1'"):
        jaxkv.load_cache(path, other)
    with pytest.raises(ValueError, match="the cache belongs to another model than 'tiny-1'"):
        answer(other, jaxkv.load_cache(path))
    with pytest.raises(TypeError, match="params=.*Pass one from jaxkv.load"):
        jaxkv.load_cache(path, "tiny-1")


def test_places_that_are_taken(tmp_path):
    _, cache, path = saved(tmp_path)
    (tmp_path / "file").write_text("mine")
    for taken in (path, tmp_path / "file"):
        with pytest.raises(ValueError, match="path=.*it exists already"):
            cache.save(taken)
    with pytest.raises(ValueError, match="path=.*the folder cannot be created"):
        cache.save(tmp_path / "file" / "cache")
    with pytest.raises(
        ValueError, match=r"path=.*\.partial is reserved for incomplete folders: leave it out"
    ):
        cache.save(tmp_path / "mine.partial")
    assert_same(jaxkv.load_cache(path), cache)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "file"]
    cache.save(tmp_path / "new" / "folder")
    assert_same(jaxkv.load_cache(str(tmp_path / "new" / "folder")), cache)


def test_a_save_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    _, cache, path = saved(tmp_path)
    errors = {
        "write_json": OSError(28, "No space left on device"),
        "write_arrays": ValueError("OUT_OF_RANGE: No space left on device\nhere"),
    }
    for step, error in errors.items():
        with monkeypatch.context() as patched:

            def full(*_, error=error):
                raise error

            patched.setattr(jaxkv.checkpoints.orbax_files, step, full)
            with pytest.raises(ValueError, match="path=.*No space left on device"):
                cache.save(tmp_path / "other")
    assert [each.name for each in tmp_path.iterdir()] == ["cache"]
    # Killed, it leaves a folder whose name says what it is.
    shutil.copytree(path, tmp_path / ".other.x1.partial")
    with pytest.raises(ValueError, match=r"path=.*\.partial: not a complete folder"):
        jaxkv.load_cache(tmp_path / ".other.x1.partial")


def test_caches_whose_arrays_were_given_up(tmp_path):
    _, cache, _ = saved(tmp_path)
    cache.seen.delete()
    with pytest.raises(ValueError, match="cache='deleted': its arrays were donated"):
        cache.save(tmp_path / "other")


# An array of a saved cache, by where it is in the cache.
SEEN = "arrays.tables.seen"


def tables_of(said):
    """What a manifest says of the cache's tables."""
    return said["cache"]["fields"]["arrays"]["fields"]["tables"]["fields"]


def edit_manifest(path, edit):
    said = json.loads((path / "jaxkv.json").read_text())
    edit(said)
    (path / "jaxkv.json").write_text(json.dumps(said))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda said: said.update(version=9), "version=9: .*: save the cache again"),
        (lambda said: said.update(format="x"), "use one written by KVCache.save"),
        (
            lambda said: said["arrays"].pop("arrays.pools.0.store.k"),
            r"array='arrays\.pools\.0\.store\.k'",
        ),
        (lambda said: said.update(cache=3), "cache='int'"),
        (lambda said: tables_of(said).pop("seen"), "its fields differ in this version"),
        (
            lambda said: said["arrays"][SEEN].update(shape=[3]),
            r"array='arrays\.tables\.seen': int32\[2\] in .*manifest has int32\[3\]",
        ),
        (
            lambda said: said["arrays"][SEEN].update(crc32=3),
            r"array='arrays\.tables\.seen': damaged",
        ),
    ],
)
def test_manifests_of_another_kind(tmp_path, edit, message):
    _, _, path = saved(tmp_path)
    edit_manifest(path, edit)
    with pytest.raises(ValueError, match=message):
        jaxkv.load_cache(path)


def test_folders_that_are_not_whole(tmp_path):
    _, _, path = saved(tmp_path)
    shutil.move(path / "arrays", tmp_path / "aside")
    with pytest.raises(ValueError, match="it cannot be read from .*arrays"):
        jaxkv.load_cache(path)
    shutil.move(tmp_path / "aside", path / "arrays")
    for data in (path / "arrays").rglob("d/*"):
        data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(ValueError, match="it cannot be read from .*arrays"):
        jaxkv.load_cache(path)
    (path / "jaxkv.json").unlink()
    with pytest.raises(ValueError, match=r"path=.*not a complete folder with jaxkv\.json"):
        jaxkv.load_cache(path)
    with pytest.raises(ValueError, match="path=.*not a complete folder"):
        jaxkv.load_cache(tmp_path / "nothing")


def test_weights_are_no_cache_and_a_cache_is_no_weights(tmp_path):
    _, _, path = saved(tmp_path)
    with pytest.raises(ValueError, match="format='jaxkv cache'"):
        jaxkv.load(path)
    weights = jaxkv.checkpoints.convert(
        running.GOLDEN / "models" / "llama_gqa", tmp_path / "weights"
    )
    with pytest.raises(ValueError, match="format='jaxkv weights'"):
        jaxkv.load_cache(weights)
