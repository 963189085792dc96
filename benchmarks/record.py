"""What benchmarks write down besides their figures: the machine they ran on, in a file that is whole at any time."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def save(path, results):
    """Writes JSON beside the file and moves it there: a killed run leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(results, indent=1) + "\n")
        os.chmod(part, 0o644)  # mkstemp's own mode is the owner's alone.
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def add(path, title, found):
    """Saves figures in a file that keeps those of other titles."""
    results = json.loads(path.read_text()) if path.exists() else {}
    save(path, results | {title: found})


def resume(path, settings):
    """What an earlier run with the same settings has saved; other settings are rejected, not mixed."""
    if not path.exists():
        return {"settings": settings}
    found = json.loads(path.read_text())
    # As JSON gives them back, where tuples are lists.
    if found.get("settings") != json.loads(json.dumps(settings)):
        raise SystemExit(
            f"{path} holds figures of other settings, {found.get('settings')}: give another --out"
        )
    return found


def machine():
    """Where and when a figure was measured, and what else the machine had to do then."""
    import jax  # what only keeps files must not hold a device

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
        "load": os.getloadavg()[0],
        "commit": commit(ROOT),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
    }


def random_ids(model, batch, tokens):
    """Prompts of random tokens, the same in every run."""
    import numpy as np

    return (
        np.random.default_rng(0).integers(100, model.config.vocab, (batch, tokens)).astype(np.int32)
    )


def spread(values):
    """The median, least and most of some figures."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def commit(root):
    """A checkout's commit, with -dirty where files have changed since; None outside one."""
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
