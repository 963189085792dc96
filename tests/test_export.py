"""Exports: the tokens of `generate`, from a folder that needs no jaxkv; what cannot be read says so."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import meshes
import numpy as np
import pytest
import tiny
from test_folded_layers import CONFIG as FOUR_LAYERS
from test_latents import CONFIG as LATENTS

import jaxkv
from jaxkv import cli
from jaxkv.exporting import runtime

MODEL = tiny.shape(layers=2, kv_heads=2, group=2, dim=8)
FOLDED = dataclasses.replace(FOUR_LAYERS, layers=2)
LENGTHS, QUESTIONS, NEW = (61, 37, 50), (5, 9, 3), 8
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=24, window=8),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=24, window=8)),
    "h2o": jaxkv.H2O(budget=0.4),
    "d2o": jaxkv.D2O(budget=24),
    "expected-every": jaxkv.AdaKV(
        base=jaxkv.ExpectedAttention(budget=24, future=16, every=4, smoothing=0.5)
    ),
    "rocketkv-refit": jaxkv.RocketKV(
        budget=12, channels=5, base=jaxkv.Refit(base=jaxkv.SnapKV(budget=24, window=8))
    ),
    # Compactor, whose scores XLA would compute again for each use where all layers are one program.
    "auto": jaxkv.Auto(budget=20, question="later"),
}
# 16 bits; what goes on after the prompt. SnapKV, H2O and D2O, whose layers share a pool, are further down, and all in
# both dtypes in benchmarks/export_real.py.
CASES = [
    ("full", "bfloat16"),
    ("expected-every", "float32"),
    ("rocketkv-refit", "float32"),
    ("auto", "float32"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("exports")

    def made(
        name: str,
        dtype: str = "float32",
        batch: tuple[int, ...] = (3,),
        mesh: tuple[int, int] | None = None,
    ):
        target = root / f"{name}-{dtype}-{len(batch)}-{mesh}"
        on = None if mesh is None else meshes.mesh_of(*mesh)
        of = {"lengths": 64, "question": 16, "new": 2 * NEW, "mesh": on}
        if target.exists():
            return target
        return jaxkv.export(
            tiny.tiny(MODEL, dtype=dtype), target, policy=POLICIES[name], batch=batch, **of
        )

    return made


def asked(count: int = 3):
    return tiny.prompts(5, LENGTHS)[:count], tiny.prompts(6, QUESTIONS)[:count]


@functools.cache
def wanted(name: str, dtype: str = "float32", shape: jaxkv.ModelConfig = MODEL):
    """What `generate` samples, for prompts and for questions on top of their cache."""
    model, policy, (prompts, questions) = tiny.tiny(shape, dtype=dtype), POLICIES[name], asked()
    answers = jaxkv.generate(model, prompts, policy=policy, max_new_tokens=NEW)
    cache = jaxkv.prefill(model, prompts, policy=policy)
    return [[row.tokens.tolist() for row in each] for each in (answers, jaxkv.generate(
        model, questions, cache=cache, max_new_tokens=NEW))]  # fmt: skip


def drawn(model, count: int = 3, **drawing):
    prompts, questions = asked(count)
    cache = model.read(prompts)
    return [
        model.generate(prompts, NEW, **drawing)[0],
        model.generate(questions, NEW, cache=cache, **drawing)[0],
    ]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_same_tokens_as_generate(folders, name, dtype):
    model = runtime.Model(folders(name, dtype))
    assert drawn(model) == wanted(name, dtype)


@pytest.mark.parametrize("shape", [LATENTS, FOLDED], ids=["latents", "folded"])
def test_latents_and_layers_of_different_entry_sizes(tmp_path, shape):
    target, limits = tmp_path / "folder", {"lengths": 64, "question": 16, "new": 2 * NEW}
    jaxkv.export(tiny.tiny(shape), target, policy=POLICIES["h2o"], batch=(3,), **limits)
    assert drawn(runtime.Model(target)) == wanted("h2o", shape=shape)


def test_a_batch_is_filled_and_a_cache_is_asked_many_times(folders):
    model = runtime.Model(folders("snapkv", batch=(1, 3)))
    heard = []
    whole = wanted("snapkv")
    alone = drawn(model, 1, tell=lambda tokens: heard.append(tokens.shape[1]))
    assert alone == [each[:1] for each in whole]
    assert drawn(model, 2) == [each[:2] for each in whole]
    # One sequence serves several prompts, and is left as it was.
    cache, (prompts, questions) = model.read(asked(1)[0]), asked()
    ours = [model.generate(questions, NEW, cache=cache)[0] for _ in range(2)]
    theirs = jaxkv.prefill(tiny.tiny(MODEL), prompts[:1], policy=POLICIES["snapkv"])
    theirs = jaxkv.generate(tiny.tiny(MODEL), questions, cache=theirs, max_new_tokens=NEW)
    assert ours[0] == ours[1] == [row.tokens.tolist() for row in theirs]
    assert heard == [NEW, NEW]


def test_an_answer_in_a_filled_batch_serves_several_prompts(folders):
    """Rows that fill a batch hold no answer: the next questions are asked of the sequence that does."""
    model, (prompt, questions) = runtime.Model(folders("full", "bfloat16")), asked()
    mine = model.generate(questions, NEW, cache=model.generate(prompt[:1], NEW)[2])[0]
    own = tiny.tiny(MODEL, dtype="bfloat16")
    cache = jaxkv.generate(own, prompt[:1], max_new_tokens=NEW).cache
    theirs = jaxkv.generate(own, questions, cache=cache, max_new_tokens=NEW)
    assert mine == [row.tokens.tolist() for row in theirs]


def test_a_stream_tells_each_token_once(capsys, monkeypatch):
    """Also where a sequence ends between two reports."""
    drawn = [np.arange(n)[None] for n in (8, 11)]

    def decode(ids):
        return "".join(f"<{each}>" for each in ids)

    fake = types.SimpleNamespace(text=types.SimpleNamespace(decode=decode))
    fake.generate = lambda prompts, tell: [tell(each) for each in drawn]
    source = Path(runtime.__file__).read_text("utf-8")
    main = re.search(r'\nif __name__ == "__main__":\n(.*)', source, re.DOTALL)[1]
    names = vars(runtime) | {"Model": lambda folder: fake}
    for words in ([], ["What", "is", "it?"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["runtime.py", *words])
        with pytest.raises(SystemExit, match="usage: runtime.py 'PROMPT'"):
            exec("if True:\n" + main, names)
    monkeypatch.setattr(sys, "argv", ["runtime.py", "What is it?"])
    exec("if True:\n" + main, names)  # the lines that run for `python DIR/runtime.py 'PROMPT'`
    assert capsys.readouterr().out == decode(range(11))


# -S: what an editable install put on the path is not there.
ALONE = """
import importlib.util, json, sys
sys.path[:0] = json.loads(sys.argv[2])
assert importlib.util.find_spec("jaxkv") is None
spec = importlib.util.spec_from_file_location("runtime", sys.argv[1] + "/runtime.py")
runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
model = runtime.Model(sys.argv[1], check=True)
prompts, questions, new = json.loads(sys.argv[3])
cache = model.read(prompts)
print(json.dumps([model.generate(prompts, new)[0], model.generate(questions, new, cache=cache)[0]]))
assert not [name for name in sys.modules if name.split(".")[0] in ("jaxkv", "flax", "transformers", "safetensors")]
"""


def test_a_process_without_jaxkv(folders, tmp_path):
    shutil.copytree(folders("d2o", "bfloat16"), tmp_path / "moved")
    places = {
        str(Path(importlib.util.find_spec(name).origin).parents[1])
        for name in ("jax", "flatbuffers")
    }
    given = (str(tmp_path / "moved"), json.dumps(sorted(places)), json.dumps([*asked(), NEW]))
    command = [sys.executable, "-I", "-S", "-c", ALONE, *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted("d2o", "bfloat16")


def test_the_command_loads_the_model_in_its_dtype(tmp_path, monkeypatch):
    given = {}

    def export(model, folder, **options):
        given.update(options, model=model)
        raise ValueError("enough")

    monkeypatch.setattr("jaxkv.cli.exporting.export", export)
    options = "--model tiny-retrieval --dtype bfloat16 --no-weights".split()
    assert cli.main(["export", str(tmp_path / "out"), *options]) == 2
    assert given["model"].dtype == "bfloat16" and given["weights"] is False


def test_the_loader_imports_jax_and_numpy_alone():
    text = Path(runtime.__file__).read_text("utf-8")
    imported = {
        line.split()[1].split(".")[0]
        for line in text.splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported - set(sys.stdlib_module_names) == {"jax", "numpy"}


def test_four_devices(folders):
    model = runtime.Model(folders("h2o", mesh=(1, 4)))
    assert model.said["devices"] == 4 and drawn(model) == wanted("h2o")
    assert len(model.weights["blocks.0.attention.q"].sharding.device_set) == 4


def test_programs_for_a_gpu_are_written_without_one(tmp_path):
    model = tiny.tiny(MODEL, dtype="bfloat16").on(meshes.mesh_of(1, 4))
    options = {"lengths": 64, "question": 0, "new": NEW, "platforms": ("cuda",)}
    folder = jaxkv.export(
        model, tmp_path / "out", policy=POLICIES["adakv"], weights=False, **options
    )
    said = json.loads((folder / "manifest.json").read_text("utf-8"))
    read = jax.export.deserialize(
        bytearray((folder / "programs" / said["programs"][0]["file"]).read_bytes())
    )
    assert read.platforms == ("cuda",) and read.nr_devices == 4
    assert {each["kind"] for each in said["programs"]} == {"prompt", "sample.Greedy"}
    with pytest.raises(ValueError, match=r"exported for 4 devices of .'cuda'., not 8 of cpu"):
        runtime.Model(folder)


def test_numbers_of_samplers_are_arguments(tmp_path):
    model = tiny.tiny(MODEL)
    of = {"lengths": 64, "question": 0, "new": NEW, "sampling": jaxkv.Sampling(top_p=0.9)}
    exported = runtime.Model(jaxkv.export(model, tmp_path / "out", **of))
    ids = tiny.prompts(5, (40,))
    for heat, p in ((1.0, 0.9), (3.0, 0.5)):
        mine = exported.generate(ids, NEW, seed=7, sampling="Sampling", temperature=heat, top_p=p)[
            0
        ]
        theirs = jaxkv.generate(
            model,
            ids,
            max_new_tokens=NEW,
            sampling=jaxkv.Sampling(temperature=heat, top_p=p),
            key=7,
        )
        assert mine == [theirs[0].tokens.tolist()]
    with pytest.raises(ValueError, match="sampling=.TopK.: unknown: use one of "):
        exported.generate(ids, NEW, sampling="TopK")


def test_a_prompt_below_what_must_stay_is_refused(tmp_path):
    options = {"lengths": 64, "question": 0, "new": NEW}
    policy = jaxkv.SnapKV(budget=0.25, min_budget="raise")
    model = runtime.Model(
        jaxkv.export(tiny.tiny(MODEL), tmp_path / "out", policy=policy, **options)
    )
    with pytest.raises(ValueError, match=r"prompt=\[40\] tokens: the policy's budget is too small"):
        model.read(tiny.prompts(5, (40,)))


PROMPTS = (
    ([[1] * 65], 1, "prompt=65 tokens: at most 64: use fewer, or export with more lengths="),
    ([[1]] * 4, 1, "prompt=4 prompts: at most 3: use fewer, or export with batch=4"),
    (["text"], 1, "prompt='text': no tokenizer: use token ids"),
)


@pytest.mark.parametrize(("prompts", "new", "told"), PROMPTS)
def test_prompts_that_are_refused(folders, prompts, new, told):
    with pytest.raises(ValueError, match=told):
        runtime.Model(folders("full", "bfloat16")).generate(prompts, new)


def changed(folder: Path, change) -> None:
    said = json.loads((folder / "manifest.json").read_text("utf-8"))
    change(said)
    (folder / "manifest.json").write_text(json.dumps(said), "utf-8")


DAMAGE = {
    "a wrong shape": (
        lambda folder: changed(
            folder, lambda said: said["programs"][0]["outputs"][0]["shape"].append(1)
        ),
        r"differs from the manifest, pools.0.store.k \('float32', 3, \d+, 8, 1\), here \('float32', 3, \d+, 8\)",
    ),
    "a missing program": (
        lambda folder: next((folder / "programs").iterdir()).unlink(),
        "missing: copy the whole",
    ),
    "a program cut short": (
        lambda folder: os.truncate(next((folder / "programs").iterdir()), 100),
        "damaged: copy",
    ),
    "missing weights": (
        lambda folder: (folder / "weights.safetensors").unlink(),
        "weights.safetensors: missing",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "manifest.json: .*: use a complete folder",
    ),
    "a later version's manifest": (
        lambda folder: changed(folder, lambda said: said.update(version=9)),
        "manifest.json: another version than this runtime.py's: use a complete folder",
    ),
    "a later jax": (
        lambda folder: changed(
            folder, lambda said: said["guaranteed"].update({"from": [99, 0], "jax": "99.0.1"})
        ),
        r"exported by jax 99.0.1, and jax .* is outside its window: export again",
    ),
    "more devices": (
        lambda folder: changed(folder, lambda said: said.update(devices=16)),
        "exported for 16 devices",
    ),
    "another platform": (
        lambda folder: changed(folder, lambda said: said.update(platforms=["tpu"])),
        "devices of .'tpu'., not",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_told_in_one_line(folders, tmp_path, damage):
    shutil.copytree(folders("full", "bfloat16"), tmp_path / "copy")
    do, told = DAMAGE[damage]
    do(tmp_path / "copy")
    with pytest.raises(ValueError, match=told) as error:
        runtime.Model(tmp_path / "copy")
    assert "\n" not in str(error.value)


COMMANDS = (
    (["--platforms", "gpu"], "--platforms=gpu: use one of cpu, cuda, rocm, tpu"),
    (["--mesh", "8"], "--mesh='8': give devices by data and model, such as 1x8"),
    (["--lengths", "many"], "--lengths=many"),
)


@pytest.mark.parametrize(("options", "told"), COMMANDS)
def test_commands_that_are_refused(capsys, tmp_path, options, told):
    assert cli.main(["export", str(tmp_path / "out"), *options]) == 2
    assert told in capsys.readouterr().err and not list(tmp_path.iterdir())
