"""What is read off programs that are compiled for GPUs that are not there, and the bounds they are held to."""

import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float
from meshes import mesh_of, model_of

from benchmarks import hlo
from jaxkv.sharding.collectives import gathered, total
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.parameters import model_mesh

# As XLA writes it for GPUs, where what travels is begun and waited for apart.
TEXT = """HloModule jit__loop, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, must-alias) }, \
entry_computation_layout={(s32[4]{0}, bf16[4,2304,128]{2,1,0}, /*index=2*/f32[4,2304]{1,0})->(bf16[4,2304,128]{2,1,0})}
  %sum.1 = f32[4,1,8192]{2,1,0} all-reduce-start(%x), channel_id=1
  %sum.3 = ((f32[4,1,8192]{2,1,0}), f32[4,1,8192]{2,1,0}) all-reduce-start(%u), channel_id=1
  %done.1 = f32[4,1,8192]{2,1,0} all-reduce-done(%sum.1)
  %sum.2 = f32[4,1,8192]{2,1,0} all-reduce-start(%y), channel_id=2
  %both = (f32[4]{0}, s32[]) all-reduce(%z, %w), channel_id=3
  %logits = (f32[4,16032]{0,1}, f32[4,128256]{0,1}) all-gather-start(%l), channel_id=4
  %copy.3 = bf16[4,2304,128]{2,1,0} copy(%p)
  %copy.4 = bf16[4,17,128]{2,1,0} copy(%q)
  %copied = (bf16[4,2304,128]{2,1,0}, bf16[4,2304,128]{2,1,0}, u32[]) copy-start(%p)
"""


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark that is run as a script."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module


def test_text():
    assert hlo.collectives(TEXT) == {
        ("all-reduce", (("f32", (4, 1, 8192)),)): 3,
        ("all-reduce", (("f32", (4,)), ("s32", ()))): 1,
        ("all-gather", (("f32", (4, 128256)),)): 1,
    }
    assert hlo.aliased(TEXT) == 4 * 2304 * (128 * 2 + 4)
    assert hlo.copies(TEXT, {("bf16", (4, 2304, 128)), ("f32", (4, 2304))}) == 2
    assert hlo.aliased(TEXT.replace("input_output_alias", "other")) == 0
    assert hlo.shown(hlo.arrays_in("(f32[4,2]{1,0}, pred[])")) == "f32[4,2] pred[]"


@program(static=("axes",), donate=("x",))
def _scaled(
    x: Float[Array, "B V"], y: Float[Array, "B E"], *, axes: Axes | None
) -> Float[Array, "B V"]:
    sums = total(y, axes).sum(axis=1, keepdims=True)
    return x + sums * gathered(x, "V", 1, axes).max(axis=1, keepdims=True)


def test_a_compiled_program():
    axes = Axes(mesh=model_mesh(mesh_of(2, 4), model_of(4).config))
    text = _scaled.lower(jnp.ones((2, 8)), jnp.ones((2, 3)), axes=axes).compile().as_text()
    assert hlo.collectives(text) == {
        ("all-reduce", (("f32", (1, 3)),)): 1,
        ("all-gather", (("f32", (1, 8)),)): 1,
    }
    assert hlo.aliased(text) == 2 * 4 and not hlo.copies(text, {("f32", (1, 2))})


GOOD = {
    "gpus": 8,
    "layers": 2,
    "layers_of_model": 4,
    "embed": 8192,
    "head_dim": 128,
    "rows": [2304, 9000],
    "written": 10_000_000,
    "arguments": 10**9,
    "temporaries": 390_000,
    "peak": 2 * 10**9,
    "aliased": 10_000_000,
    "copies": 0,
    "sent": [
        ["all-reduce", "bf16[4,1,8192]", 1],
        ["all-reduce", "f32[4,1,8192]", 4],
        ["all-reduce", "s32[]", 1],
    ],
    "trace_seconds": 1.0,
    "compile_seconds": 2.0,
}
BAD = {
    "copied 1 times": {"copies": 1},
    "1 bytes are not written in place": {"aliased": 9_999_999},
    "temporaries are 400,001 bytes, more than 400,000": {"temporaries": 400_001},
    "6 sums of hidden states": {"sent": [["all-reduce", "f32[4,1,8192]", 6]]},
    "the peak is 81.0 GB": {"peak": 81 * 10**9},
    "keys or values travel: all-gather of bf16[4,2304,128]": {
        "sent": [*GOOD["sent"], ["all-gather", "bf16[4,2304,128]", 1]]
    },
}


def test_bounds(script, capsys):
    sharded = script("aot_sharded")
    row = sharded.Row("70B", 1, "decode", "SnapKV")
    assert sharded.told(row, GOOD) and not capsys.readouterr().err
    for message, change in BAD.items():
        assert not sharded.told(row, GOOD | change)
        assert message in capsys.readouterr().err
    # What is there to show that it does not fit is wrong when it does.
    large = sharded.Row("405B", 2, "decode", "FullKV", too_large=True)
    assert sharded.told(large, GOOD | {"peak": 81 * 10**9}) and not sharded.told(large, GOOD)
    assert "does not fit" in capsys.readouterr().out


def test_a_run_goes_on_where_it_stood(script, tmp_path, monkeypatch, capsys):
    sharded, made = script("aot_sharded"), []
    monkeypatch.syspath_prepend(Path(sharded.__file__).parent)
    monkeypatch.setattr(sharded, "RESULTS", tmp_path / "made" / "results.json")
    monkeypatch.setattr(sharded, "ROWS", sharded.ROWS[:3])
    monkeypatch.setattr("sys.argv", ["aot_sharded.py"])

    def ends(row):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(row.name)
        return GOOD

    monkeypatch.setattr(sharded, "in_its_own_process", ends)
    with pytest.raises(KeyboardInterrupt):
        sharded.main()
    assert len(json.loads(sharded.RESULTS.read_text())["rows"]) == 2
    monkeypatch.setattr(sharded, "in_its_own_process", lambda row: made.append(row.name) or GOOD)
    for count, status in ((3, 0), (3, 0)):
        with pytest.raises(SystemExit) as ended:
            sharded.main()
        assert (len(made), ended.value.code) == (count, status)
    table = sharded.RESULTS.with_suffix(".md").read_text().splitlines()
    assert [len(line.split("|")) for line in table if line.startswith("|")] == [
        len(sharded.COLUMNS) + 2
    ] * 5
    monkeypatch.setattr(sharded, "sources", lambda: "others")
    with pytest.raises(SystemExit):
        sharded.main()
    assert len(made) == 6
