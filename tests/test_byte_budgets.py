"""Budgets in bytes: as many rows as fit, of every policy and store, and what bytes cannot be given to."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_table import TABLE

import jaxkv
from jaxkv.cli import main
from jaxkv.policies.checks import ByteBudget, parse_byte_count
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.wrapper import replace_policy_budget

CONFIG = tiny.MODELS["gqa3"]
# Keys, values and positions of one row in every kv head and layer: float32, bfloat16, and codes with their scales.
EACH = {
    ("dense", "float32"): 3 * 2 * (2 * 8 * 4 + 4),
    ("dense", "bfloat16"): 3 * 2 * (2 * 8 * 2 + 4),
    ("int8", "float32"): 3 * 2 * (2 * (8 + 2) + 4),
    ("int4", "bfloat16"): 3 * 2 * (2 * (8 // 2 + 4) + 4),
    ("mixed", "float32"): 3 * 2 * (8 + 2 + 8 // 2 + 4 + 4),
}


def fitted(policy, dtype="float32"):
    return resolve_policy_for_model(policy, CONFIG, (0,), dtype=dtype)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64MB", 64 * 10**6),
        ("64 mb", 64 * 10**6),
        (" 1.5GB ", 1500 * 10**6),
        ("64MiB", 64 * 2**20),
        ("0.1kb", 100),
        ("7B", 7),
        ("64", None),
        ("64ib", None),
        ("MB", None),
        ("-1MB", None),
        ("1e3MB", None),
        ("64MB\n64MB", None),
    ],
)
def test_texts_say_bytes(text, count):
    assert parse_byte_count(text) == count


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if row.make(24).build_policy_parts().compresses_prompts],
    ids=lambda row: row.name,
)
def test_every_policy_has_as_many_rows_as_fit(row):
    policy = row.make(24)
    each = (
        CONFIG.layers
        * CONFIG.kv_heads
        * policy.build_policy_parts().compute_entry_bytes(CONFIG.head_dim, 4)
    )
    most = 25 * each - 1
    wanted = fitted(replace_policy_budget(policy, 24))
    assert fitted(replace_policy_budget(policy, f"{most}B")) == wanted
    assert (
        fitted(replace_policy_budget(policy, f"{24 * each}B"))
        == wanted
        != fitted(replace_policy_budget(policy, f"{25 * each}B"))
    )


@pytest.mark.parametrize(("store", "dtype"), EACH)
def test_stores_and_dtypes_say_how_many_rows(store, dtype):
    each = EACH[store, dtype]
    found = fitted(jaxkv.SnapKV(budget=f"{40 * each + 1}B", window=8, store=store), dtype)
    assert found == jaxkv.SnapKV(budget=40, window=8, store=store)


def test_entries_that_wait_beside_their_codes_count():
    """32 keys and values of each kv head and layer in 16 bits, with positions for all heads."""
    each, last = EACH["int4", "bfloat16"], 3 * 32 * (2 * 2 * 8 * 2 + 4)
    for count, given in ((40, 40 * each + last), (39, 40 * each + last - 1)):
        asked = jaxkv.SnapKV(budget=f"{given}B", window=8, store="int4-residual")
        assert fitted(asked, "bfloat16") == replace_policy_budget(asked, count)


@pytest.mark.parametrize("policy", [jaxkv.AdaKV, jaxkv.D2O])
def test_caches_take_no_more(policy):
    """Of two prompts, one shorter than its rows; kept rows' bytes are counted as `Stats` counts them."""
    made = policy(budget="12KB", store="int8")
    session = jaxkv.Session(tiny.tiny(CONFIG), made)
    rows = session.policy.budget
    cache = session.prefill(tiny.prompts(3, (90, rows // 2)))
    row = cache.headroom_nbytes((1,) * CONFIG.layers) // (CONFIG.layers * CONFIG.kv_heads)
    kept = np.asarray(cache.kept).sum(axis=(0, 2)) * row
    assert 12_000 - 6 * row < kept[0] <= 12_000 and kept[1] <= kept[0]


def test_spellings_are_one():
    one, other = jaxkv.SnapKV(budget="64MB"), jaxkv.SnapKV(budget=" 0.064 gb")
    assert one.composed == other.composed and (one.budget, other.budget) == ("64MB", " 0.064 gb")
    assert jaxkv.SnapKV(budget="1KiB").composed.budget == ByteBudget(1024)
    assert jaxkv.SnapKV(budget=np.str_("2GB")).budget == "2GB"


def test_bases_have_the_bytes():
    """A wrapper's bytes are its base's; OmniKV's base has its own, and OmniKV reads tokens."""
    each = EACH["dense", "float32"]
    text = f"{32 * each}B"
    ours, other = (
        fitted(jaxkv.AdaKV(base=jaxkv.PyramidKV(budget=each, window=8))) for each in (text, 32)
    )
    assert ours.composed == other.composed
    omni = fitted(jaxkv.OmniKV(base=jaxkv.SnapKV(budget=text, window=8), filter_layers=(0,)))
    assert omni.base_policy.budget == 32


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: jaxkv.SnapKV(budget="64"), "budget='64'"),
        (lambda: jaxkv.SnapKV(budget="0MB"), "budget='0MB'"),
        (lambda: jaxkv.FullKV(budget="64MB"), "budget="),
        (lambda: jaxkv.OmniKV(budget="64MB"), "budget="),
        (lambda: fitted(jaxkv.SnapKV(budget="400B")), "budget='400B'.*408 bytes"),
        (lambda: fitted(jaxkv.SnapKV(budget="5KB")), "budget='5000B'.*budget=12"),
        (
            lambda: jaxkv.compress(
                *[jnp.zeros((1, 2, 64, 8))] * 2, policy=jaxkv.KeyDiff(budget="1MB")
            ),
            "budget",
        ),
    ],
)
def test_what_bytes_cannot_be_given_to(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_saved_caches_say_rows(tmp_path):
    policy, model = jaxkv.SnapKV(budget="16KB", window=8), tiny.tiny(CONFIG)
    cache = jaxkv.Session(model, policy).prefill(tiny.prompts(5, (90, 61)))
    cache.save(tmp_path / "cache")
    assert jaxkv.load_cache(tmp_path / "cache", model).policy == jaxkv.SnapKV(budget=39, window=8)
    with pytest.raises(ValueError, match="omit the policy"):
        jaxkv.load_cache(tmp_path / "cache", model, policy=policy)


def test_plans_take_bytes(capsys):
    """The rows that a plan of the same sizes prints."""
    words = "--model llama-3.1-8b --gpus h100x1 --context 32768 --budget 64MB --json".split()
    main(["plan", *words, "--policy", "snapkv", "--store", "int8"])
    told = json.loads(capsys.readouterr().out)
    each = 32 * 8 * (2 * 130 + 4)
    assert f"budget={64 * 10**6 // each}" in json.dumps(told)
