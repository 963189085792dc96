"""The kernels that read whole prompts, interpreted, against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import DTYPES, KINDS, draw, wide

import pallas_kernels
from pallas_kernels import tiles as sizes
from pallas_kernels._compat import round_up_head_dim
from pallas_kernels.tiles import PrefillTiles, WindowTiles

TILES = PrefillTiles(queries=16, keys=16)
WINDOW = WindowTiles(rows=16, keys=16, chunk=32)


def causal_oracle(q, k, v, first, length, window=None, sinks=None):
    """Loops over queries; out, lse, and column sums (mean over the group)."""
    q, k, v = wide(q), wide(k), wide(v)
    batch, heads, group, queries, dim = q.shape
    out, lse = np.zeros(q.shape), np.full(q.shape[:4], -np.inf)
    sums = np.zeros(k.shape[:3])
    for b, h, g, t in np.ndindex(batch, heads, group, queries):
        position = first[b] + t
        if not 0 <= position < length[b]:
            continue
        near = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        logits = k[b, h, near] @ q[b, h, g, t] / np.sqrt(dim)
        weights = np.exp(logits - logits.max())
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[b, h, g] - logits.max()))
        lse[b, h, g, t] = logits.max() + np.log(total)
        weights /= total
        out[b, h, g, t] = weights @ v[b, h, near]
        sums[b, h, near] += weights / group
    return out, lse, sums


def check_causal(seed, shape, first, length, dim, dtype, tiles=TILES):
    batch, heads, group, queries, slots = shape
    kind, tolerance = DTYPES[dtype]
    q, k, v = draw(
        seed,
        (batch, heads, group, queries, dim),
        (batch, heads, slots, dim),
        (batch, heads, slots, dim),
        dtype=kind,
    )
    first, length = np.asarray(first, np.int32), np.asarray(length, np.int32)
    out, lse = pallas_kernels.flash(
        q, k, v, jnp.asarray(first), jnp.asarray(length), tiles=tiles, interpret=True
    )
    sums = pallas_kernels.sum_attention_per_key(
        q, k, lse, jnp.asarray(first), jnp.asarray(length), tiles=tiles, interpret=True
    )
    assert out.dtype == kind
    for ours, theirs in zip((out, lse, sums), causal_oracle(q, k, v, first, length), strict=True):
        np.testing.assert_allclose(wide(ours), theirs, rtol=tolerance * 4, atol=tolerance * 4)


@pytest.mark.parametrize(("dim", "dtype"), KINDS)
def test_flash_and_column_sums_every_dtype_and_dim(dim, dtype):
    """Unequal lengths, GQA, lengths that are no multiple of a block."""
    check_causal(0, (2, 2, 2, 37, 37), [0, 0], [37, 20], dim, dtype)


@pytest.mark.parametrize(
    ("first", "length"), [([24, 8], [40, 24]), ([-3, 30], [13, 46]), ([0, 16], [0, 9])]
)
def test_flash_with_an_offset(first, length):
    """The last 16 queries alone; some before the prompt's beginning, some past its end, a sequence of no tokens."""
    check_causal(1, (2, 2, 3, 16, 48), first, length, 64, "float32")


@pytest.mark.parametrize(
    ("window", "queries", "first", "length"),
    [
        (1, 16, [59, -3], [75, 30]),
        (7, 75, [0, 0], [75, 40]),
        (33, 16, [59, -3], [75, 30]),
        (90, 75, [0, 0], [75, 40]),
    ],
)
def test_flash_within_a_window(window, queries, first, length):
    """Blocks of keys that lie before all windows are not read: what is not a number in them does not show."""
    q, k, v = draw(4, (2, 2, 2, queries, 64), (2, 2, 75, 64), (2, 2, 75, 64))
    at, lengths = (np.asarray(each, np.int32) for each in (first, length))
    want = causal_oracle(q, k, v, at, lengths, window)[:2]
    unread = max(0, first[0] - window + 1) // TILES.keys * TILES.keys
    k, v = (each.at[0, :, :unread].set(jnp.nan) for each in (k, v))
    found = pallas_kernels.flash(
        q, k, v, jnp.asarray(at), jnp.asarray(lengths), tiles=TILES, window=window, interpret=True
    )
    for ours, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(wide(ours), theirs, rtol=2e-5, atol=2e-5)


def check_window(shape, first, length, dim, dtype, sinks=None):
    """Three query heads of several queries fill no tile of 16 rows exactly; keys are in several chunks."""
    batch, heads, group, window, slots = shape
    kind, tolerance = DTYPES[dtype]
    q, k = draw(5, (batch, heads, group, window, dim), (batch, heads, slots, dim), dtype=kind)
    first, length = np.asarray(first, np.int32), np.asarray(length, np.int32)
    numbers, given = (
        (jnp.asarray(first), jnp.asarray(length)),
        None if sinks is None else jnp.asarray(sinks),
    )
    sums = pallas_kernels.sum_window_attention(q, k, *numbers, given, tiles=WINDOW, interpret=True)
    expected = causal_oracle(q, k, k, first, length, sinks=sinks)[2]
    np.testing.assert_allclose(wide(sums), expected, rtol=tolerance * 4, atol=tolerance * 4)
    for b, tokens in enumerate(length):
        assert not np.asarray(sums)[b, :, max(tokens, 0) :].any()


@pytest.mark.parametrize(("dim", "dtype"), KINDS)
def test_window_sums_every_dtype_and_dim(dim, dtype):
    """The last 8 queries of prompts of unequal lengths, none of them a multiple of a block."""
    check_window((2, 2, 3, 8, 75), [67, 43], [75, 51], dim, dtype)


def test_window_sums_with_sinks_of_the_softmax():
    """One logit of each query head takes part, large ones and small ones."""
    sinks = np.linspace(-4, 6, 12, dtype=np.float32).reshape(2, 2, 3)
    check_window((2, 2, 3, 8, 75), [67, -3], [75, 5], 64, "float32", sinks)


@pytest.mark.parametrize(
    ("shape", "first", "length"),
    [
        ((2, 2, 3, 8, 70), [-3, 62], [5, 70]),
        ((2, 2, 3, 8, 70), [-8, 0], [0, 8]),
        ((2, 2, 3, 8, 70), [40, 60], [46, 68]),
        ((2, 1, 4, 8, 40), [32, 13], [40, 21]),
    ],
)
def test_window_sums_at_the_edges(shape, first, length):
    """Prompts shorter than the window, of no tokens, ending with the slots or before the window does.

    One row in a tile of 16, and tiles that rows fill exactly.
    """
    check_window(shape, first, length, 64, "float32")


def test_tiles_fit_the_device(monkeypatch):
    """Larger ones where programs have more shared memory, which names tell; none asks for more than there is."""
    devices = {
        "NVIDIA H200": (232448, (128, 3)),
        "NVIDIA A100-SXM4-80GB": (166912, (64, 3)),
        "NVIDIA RTX A3000 Laptop GPU": (101376, (64, 3)),
        "NVIDIA GB10": (101376, (64, 3)),
    }
    for name, (shared, expected) in devices.items():
        monkeypatch.setattr(sizes, "device_kind", lambda name=name: name)
        tiles = sizes.choose_prefill_tiles(dim=128, itemsize=2)
        assert (tiles.keys, tiles.launch.stages) == expected, name
        for dim in (64, 80, 128, 256):
            tiles = sizes.choose_prefill_tiles(dim=dim, itemsize=2)
            rows = 2 * tiles.keys * tiles.launch.stages + (tiles.queries if "H200" in name else 8)
            assert rows * round_up_head_dim(dim) * 2 <= shared, (name, dim)


def test_the_device_that_is_compiled_for(monkeypatch):
    """A mesh's, or without one the first that is here."""
    assert sizes.device_kind() == jax.devices()[0].device_kind
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]).abstract_mesh
    monkeypatch.setattr(jax, "devices", lambda: [])
    with jax.sharding.use_abstract_mesh(mesh):
        assert sizes.device_kind() == mesh.abstract_device.device_kind
