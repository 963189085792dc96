"""DuoAttention, whose pattern belongs to one model: answers against the oracle, meshes, slots, rejections."""

import json

import meshes
import numpy as np
import oracles as o
import pytest
import slot_runs
import tiny
from policy_row import Row
from test_invariants import check_layout, check_rows

import jaxkv
from jaxkv import AdaKV, ChunkKV, DuoAttention
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.plan import plan_prefill

SINKS, WINDOW = 3, 9


def pattern_of(layers, heads, seed=1):
    """Numbers as in published files: many close to 0 or 1, no two alike."""
    return tuple(map(tuple, np.random.default_rng(seed).beta(0.4, 0.4, (layers, heads)).tolist()))


def duo(layers, heads, sparsity=0.5, **options):
    return DuoAttention(
        pattern=pattern_of(layers, heads), sparsity=sparsity, sinks=SINKS, window=WINDOW, **options
    )


def held(cache):
    """Positions `[B][L][K]` of every segment, ascending: rows that were moved lie elsewhere."""
    layers, batch, heads = cache.start.shape
    found = [[[None] * heads for _ in range(layers)] for _ in range(batch)]
    for layer, row, head, _, _, pos in tiny.segments(cache):
        found[row][layer][head] = sorted(pos.tolist())
    return found


@pytest.mark.parametrize("sparsity", (0.0, 0.1, 0.5, 0.999, 1.0))
@pytest.mark.parametrize("shape", ((4, 4), (3, 5), (1, 1)))
def test_kinds_are_the_published_quantiles(shape, sparsity):
    kinds = duo(*shape, sparsity).build_policy_parts().heads.retrieval_head_mask
    assert [list(row) for row in kinds] == o.duo_kinds(pattern_of(*shape), sparsity)


def test_of_ties_the_first_heads_keep_all():
    heads = DuoAttention(pattern=((1.0, 1.0), (1.0, 0.0))).build_policy_parts().heads
    assert heads.retrieval_head_mask.tolist() == [[True, True], [False, False]]


def test_rows_are_the_oracles_in_prompts_questions_and_answers(tmp_path):
    config, lengths, asked, new = tiny.TWO_LAYERS, (50, 7, 21), (15, 3, 1), 20
    model, policy, sparsity = tiny.tiny(config), duo(config.layers, config.kv_heads), 0.5
    pattern = policy.pattern

    def expected(seen):
        return [o.duo(pattern, sparsity, n, SINKS, WINDOW) for n in seen]

    session = jaxkv.Session(model, policy)
    cache = session.prefill(tiny.prompts(3, lengths), new=new)
    assert held(cache) == expected(lengths)
    check_layout(cache, lengths)
    headroom = compute_prefill_headroom(
        policy.build_policy_parts(), config.sliding_windows, np.asarray(lengths), new
    )
    planned = plan_prefill(config, policy, lengths, headroom=headroom)
    assert cache.nbytes == planned.cache_bytes
    of_layers, heads = cache.kept.sum(axis=2), config.kv_heads
    assert ((of_layers <= heads * planned.rows) & (of_layers > heads * (planned.rows - 1))).all()
    full = jaxkv.Session(model, jaxkv.FullKV()).prefill(tiny.prompts(3, lengths))
    check_rows(cache, full)
    cache = session.extend(cache, tiny.prompts(4, asked), new=new)
    cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", model)
    assert loaded.policy == policy and held(loaded) == held(cache)
    cache, _ = session.sample(cache, new, donate=True)
    seen = [int(n) for n in cache.seen]
    assert seen == [one + other + new for one, other in zip(lengths, asked, strict=True)]
    # The last sampled token's row came last, and for it one went.
    assert held(cache) == expected(seen)


def test_protected_spans_come_first():
    config = tiny.TWO_LAYERS
    policy = duo(config.layers, config.kv_heads, 1.0, protect=((10, 30),))
    session = jaxkv.Session(tiny.tiny(config), policy)
    cache, _ = session.sample(session.prefill(tiny.prompts(5, (40,)), new=6), 6)
    assert all(
        set(head) >= {*range(SINKS), *range(10, 30)} for layer in held(cache)[0] for head in layer
    )


def test_meshes():
    made = duo(meshes.LAYERS, 2)
    row = Row(name="duo", make=lambda budget: made, oracle=None, uniform=False)
    meshes.check_row(row, 2, asks=True)


def test_slots():
    config = tiny.TWO_LAYERS
    asked = slot_runs.requests(1, 6, shortest=33)
    slot_runs.check(tiny.tiny(config), duo(config.layers, config.kv_heads), asked)


def test_files(as_users_call, tmp_path):
    table = pattern_of(2, 3)
    np.savetxt(tmp_path / "full_attention_heads.tsv", table, delimiter="\t")
    plain = DuoAttention(pattern=tmp_path)
    assert plain == DuoAttention(pattern=table) and (plain.sinks, plain.window) == (64, 256)
    (tmp_path / "config.json").write_text(
        json.dumps({"sink_size": 128, "recent_size": 200, "model_name": "x"})
    )
    for path in (tmp_path, str(tmp_path / "full_attention_heads.tsv")):
        found = DuoAttention(pattern=path, window=7)
        assert found == DuoAttention(pattern=[list(row) for row in table], sinks=128, window=7)
    (tmp_path / "config.json").write_text('{"sink_size": -1}')
    with pytest.raises(ValueError, match="sinks=-1: give 0 or more"):
        DuoAttention(pattern=tmp_path)


@pytest.mark.parametrize(
    "bad", ((), (1.0,), ((1.0,), (1.0, 2.0)), (("1",),), ((float("nan"),),), 3)
)
def test_what_is_no_pattern_is_refused(as_users_call, bad):
    with pytest.raises(ValueError, match="pattern="):
        DuoAttention(pattern=bad)


def test_what_is_no_file_of_a_pattern_is_refused(as_users_call, tmp_path):
    path = tmp_path / "full_attention_heads.tsv"
    for bad in (b"1\t2\n3", b"a\tb", None):
        path.unlink(missing_ok=True) if bad is None else path.write_bytes(bad)
        with pytest.raises(ValueError, match="pattern="):
            DuoAttention(pattern=path)


def test_what_does_not_fit_is_refused(as_users_call):
    model = tiny.tiny(tiny.TWO_LAYERS)
    for make, message in (
        (lambda: DuoAttention(budget=64), "budget="),
        (lambda: DuoAttention(every=4), "every="),
        (lambda: DuoAttention(sparsity=1.5), "sparsity="),
        (lambda: AdaKV(base=DuoAttention()), "base="),
        (lambda: ChunkKV(base=DuoAttention()), "base="),
        (lambda: jaxkv.Session(model, DuoAttention()), "pattern=None"),
        (lambda: jaxkv.Session(model, duo(5, 2)), "pattern='layers=5'"),
        (lambda: jaxkv.Session(model, duo(2, 7)), "pattern='heads=7'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
