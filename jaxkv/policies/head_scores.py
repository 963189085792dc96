"""Numbers of heads, by which HeadKV, DuoAttention and LU-KV divide rows: from tables and from files as published."""

import json
import math
import os
from typing import Any

import numpy as np

from jaxkv._checks import shortened
from jaxkv._errors import refusal, require

# A model has thousands of heads; published files say some numbers of each.
_MOST_BYTES = 32 << 20
_PATTERN = "full_attention_heads.tsv"
_REMEDY = (
    "give a number, 0 or more, for each layer and head: [[0.1, 0.4], ...], or a JSON file of them"
)


def as_head_scores(field: str, given: Any) -> tuple[tuple[float, ...], ...]:
    """Head importances as tuples `[L][H]`, from a table, {"layer-head": [numbers]} or a JSON file; ValueError if unfit.

    Raises ValueError for files that cannot be read, and for anything but numbers that are finite, 0 or more, and not
    all 0; `field` is the name in the message.
    """
    table = _content(field, given, _REMEDY) if isinstance(given, (str, os.PathLike)) else given
    array = _numbers(table)
    fits = array.ndim == 2 and bool((array >= 0).all() and 0 < array.sum() < np.inf)
    require(fits, field, given, _REMEDY)
    return tuple(map(tuple, array.tolist()))


def as_pattern(field: str, given: Any) -> tuple[tuple[tuple[float, ...], ...], dict[str, Any]]:
    """Tuple of DuoAttention's head scores `[L][K]`, clipped to [0, 1], and their config.json as a dict; or ValueError.

    `given` is a table, or the path of a published `full_attention_heads.tsv` or of its folder, whose `config.json` is
    read, too; without one the config is empty. ValueError names `field` and what is wrong.
    """
    remedy, table = "give a number for each layer and kv head, or the published folder", given
    config: Any = {}
    if isinstance(given, (str, os.PathLike)):
        path = os.path.expanduser(given)
        path = os.path.join(path, _PATTERN) if os.path.isdir(path) else path
        beside = os.path.join(os.path.dirname(path), "config.json")
        config = _content(field, beside, remedy) if os.path.exists(beside) else {}
        table = [
            line.split("\t") for line in _text(field, path, remedy).splitlines() if line.strip()
        ]
    # Only a file's numbers are text.
    array = _numbers(table, "iufV" if table is given else "U")
    fits = (
        array.ndim == 2
        and array.size > 0
        and bool(np.isfinite(array).all())
        and isinstance(config, dict)
    )
    require(fits, field, given, remedy)
    return tuple(map(tuple, array.clip(0, 1).tolist())), config


def as_curves(field: str, given: Any, count: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """LU-KV's shares of rows to drop by head, as tuples `[count][L][K]`, of a table or .npy file; ValueError if unfit.

    Raises ValueError, which names `field`, for files that cannot be read, and for anything but `count` tables of
    numbers from 0 to 1, in each of which some head keeps a share of its rows.
    """
    remedy, table = (
        f"give {count} tables of a number from 0 to 1 for each layer and kv head, or a .npy file",
        given,
    )
    if isinstance(given, (str, os.PathLike)):
        path = _file(field, given, remedy)
        try:
            table = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise refusal(
                field, given, f"it cannot be read ({error.strerror or error}): {remedy}"
            ) from None
        except Exception as error:  # numpy raises errors of ten kinds for damaged headers
            raise refusal(
                field, given, f"no .npy file ({shortened(str(error))}): {remedy}"
            ) from None
    array = _numbers(table) if getattr(table, "nbytes", 0) <= _MOST_BYTES else np.zeros(0)
    fits = array.ndim == 3 and len(array) == count and array.size > 0 and bool((array >= 0).all())
    require(fits and bool((array <= 1).all()), field, given, remedy)
    full = [at + 1 for at, each in enumerate(array) if each.min() == 1]
    require(
        not full,
        field,
        given,
        f"table {next(iter(full), 0)} drops all rows: some head must keep a share of them",
    )
    tables: Any = array.tolist()
    return tuple(tuple(map(tuple, each)) for each in tables)


def _numbers(table: Any, kinds: str = "iufV") -> np.ndarray:
    """Float64 array of a table or {"layer-head": [numbers]}; empty if unfit or if its dtype's kind is not in `kinds`.

    Text and bools are no numbers; JAX's 16-bit floats are of numpy's kind "V".
    """
    try:
        array = np.asarray(_of_names(table) if isinstance(table, dict) else table)
        return array.astype(np.float64) if array.dtype.kind in kinds else np.zeros(0)
    except (AttributeError, OverflowError, TypeError, ValueError):
        return np.zeros(0)


def _file(field: str, given: str | os.PathLike[str], remedy: str) -> str:
    """Path string with "~" expanded; ValueError for a pipe or device, but not for a folder or a missing path."""
    path = os.path.expanduser(os.fspath(given))
    other = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    require(not other, field, given, f"it is no regular file: {remedy}")
    return path


def _text(field: str, path: str | os.PathLike[str], remedy: str) -> str:
    """Text of a UTF-8 file of at most 32 MiB; ValueError if it is larger, unreadable or no text."""
    there = _file(field, path, remedy)
    try:
        with open(there, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise refusal(
            field, path, f"it cannot be read ({error.strerror or error}): {remedy}"
        ) from None
    except ValueError as error:
        raise refusal(field, path, f"it is no text ({shortened(str(error))}): {remedy}") from None


def _content(field: str, path: str | os.PathLike[str], remedy: str) -> Any:
    """Parsed content of a JSON file of at most 32 MiB; ValueError if it cannot be read or parsed."""
    try:
        return json.loads(_text(field, path, remedy))
    except (json.JSONDecodeError, RecursionError) as error:
        raise refusal(field, path, f"no file of JSON ({shortened(str(error))}): {remedy}") from None


def _of_names(numbers: dict[str, Any]) -> np.ndarray:
    """Array `[L, H]` of each head's mean number, from {"layer-head": [numbers]}; ValueError if a head has none."""
    places = [tuple(map(int, name.split("-"))) for name in numbers]
    shape = tuple(max(of_axis) + 1 for of_axis in zip(*places, strict=True))
    if math.prod(shape) != len(places) or not all(map(np.size, numbers.values())):
        raise ValueError("not every head has numbers")
    table = np.full(shape, np.nan)
    table[tuple(zip(*places, strict=True))] = list(map(np.mean, numbers.values()))
    return table
