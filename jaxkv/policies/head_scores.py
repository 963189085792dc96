"""Numbers per head by which HeadKV, DuoAttention and LU-KV divide entries, from tables or published files."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._checks import shorten_text
from jaxkv._errors import build_value_error, require

# Far above published files: models have thousands of heads, with a few numbers each.
_MOST_BYTES = 32 << 20
_PATTERN = "full_attention_heads.tsv"
_REMEDY = (
    "give a number, 0 or more, for each layer and head: [[0.1, 0.4], ...], or a JSON file of them"
)


def load_head_scores(field: str, given: Any) -> tuple[tuple[float, ...], ...]:
    """Return head importances as tuples `[L][H]`, from a table, a JSON file, or {"layer-head": [numbers]}, averaged.

    ValueError, which names `field`, for files that cannot be read, and for numbers that are not finite, below 0, or all
    0.
    """
    path = isinstance(given, (str, os.PathLike))
    table = _load_limited_file(field, given, _REMEDY, _parse_json_file) if path else given
    array = _convert_table_to_array(table)
    fits = array.ndim == 2 and bool((array >= 0).all() and 0 < array.sum() < np.inf)
    require(fits, field, given, _REMEDY)
    return tuple(map(tuple, array.tolist()))


def load_duoattention_pattern(
    field: str, given: Any
) -> tuple[tuple[tuple[float, ...], ...], dict[str, Any]]:
    """Return DuoAttention's head scores as tuples `[L][K]`, clipped to [0, 1], and a dict of config.json, or {}.

    `given` is a table, or the path of a published `full_attention_heads.tsv` or of its folder. A `config.json` next to
    the file is read, too; without one the config is empty. ValueError names `field` and the fault.
    """
    remedy = "give a number for each layer and kv head, or the published folder"
    table = given
    config: Any = {}
    if isinstance(given, (str, os.PathLike)):
        path = Path(os.path.expanduser(given))
        path = path / _PATTERN if path.is_dir() else path
        beside = path.with_name("config.json")
        config = (
            _load_limited_file(field, beside, remedy, _parse_json_file) if beside.exists() else {}
        )
        lines = _load_limited_file(field, path, remedy, _read_utf8_text).splitlines()
        table = [line.split("\t") for line in lines if line.strip()]
    # Only numbers from a file may be text.
    array = _convert_table_to_array(table, "iufV" if table is given else "U")
    fits = (
        array.ndim == 2
        and array.size > 0
        and bool(np.isfinite(array).all())
        and isinstance(config, dict)
    )
    require(fits, field, given, remedy)
    return tuple(map(tuple, array.clip(0, 1).tolist())), config


def load_eviction_curves(
    field: str, given: Any, count: int
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return LU-KV's shares of entries that each head evicts, as tuples `[count][L][K]`, from a table or .npy file.

    ValueError, which names `field`, for files that cannot be read. Tables must be `count`, of numbers from 0 to 1, each
    with a number below 1.
    """
    remedy = f"give {count} tables of a number from 0 to 1, not 1 alone, for each layer and kv head"
    table = given
    if isinstance(given, (str, os.PathLike)):
        table = _load_limited_file(
            field, given, remedy, lambda path: np.load(path, allow_pickle=False)
        )
    array = _convert_table_to_array(table)
    fits = array.ndim == 3 and len(array) == count and array.size > 0
    fits = fits and all(each.min() >= 0 and each.max() <= 1 and each.min() < 1 for each in array)
    require(fits, field, given, f"{remedy}, or a .npy file")
    tables: Any = array.tolist()
    return tuple(tuple(map(tuple, each)) for each in tables)


def _convert_table_to_array(table: Any, kinds: str = "iufV") -> np.ndarray:
    """Return a table or {"layer-head": [numbers]} as a float64 array; empty if invalid or not of numpy `kinds`.

    Text and bools are not numbers; JAX's 16-bit floats have numpy's kind "V".
    """
    try:
        array = np.asarray(_average_named_numbers(table) if isinstance(table, dict) else table)
        return array.astype(np.float64) if array.dtype.kind in kinds else np.zeros(0)
    except (AttributeError, OverflowError, TypeError, ValueError):
        return np.zeros(0)


def _load_limited_file(
    field: str, given: str | os.PathLike[str], remedy: str, load: Callable[[Path], Any]
) -> Any:
    """Return what `load` reads from a regular file of at most 32 MiB; ValueError that names `field` otherwise."""
    path = Path(os.path.expanduser(given))
    try:
        if not path.is_file():
            raise ValueError("no regular file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
        return load(path)
    except Exception as error:  # numpy raises many kinds of errors for damaged headers
        fault = f"it cannot be read ({shorten_text(str(error))}): {remedy}"
        raise build_value_error(field, given, fault) from None


def _read_utf8_text(path: Path) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark."""
    return path.read_text("utf-8-sig")


def _parse_json_file(path: Path) -> Any:
    """Return the parsed content of a JSON file."""
    return json.loads(_read_utf8_text(path))


def _average_named_numbers(numbers: dict[str, Any]) -> np.ndarray:
    """Return each head's mean number `[L, H]`, from {"layer-head": [numbers]}; ValueError if a head has none."""
    places = [tuple(map(int, name.split("-"))) for name in numbers]
    shape = tuple(max(of_axis) + 1 for of_axis in zip(*places, strict=True))
    if math.prod(shape) != len(places) or not all(map(np.size, numbers.values())):
        raise ValueError("not every head has numbers")
    table = np.full(shape, np.nan)
    table[tuple(zip(*places, strict=True))] = list(map(np.mean, numbers.values()))
    return table
