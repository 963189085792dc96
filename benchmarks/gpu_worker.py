"""The process that measures: reads requests from its standard input, a JSON object a line, and answers on the output.

Whatever else is printed goes to the standard error. It ends when its input does, or when who started it is gone.
"""

import importlib
import json
import os
import sys
import threading
import time
from importlib import metadata

from benchmarks.gpu_parts import BY_NAME

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax")
PACKAGES += ("nvidia-cudnn-cu13", "nvidia-cublas")


def _watch(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def where():
    """What figures depend on besides sources: the device, and versions of what compiles for it."""
    import jax

    device = jax.devices()[0]
    versions = {name: _version(name) for name in PACKAGES} | {"python": sys.version.split()[0]}
    if driver := getattr(device.client, "platform_version", None):
        versions["platform"] = driver.replace("\n", " ")
    names = ("core_count", "compute_capability", "shared_memory_per_block_optin")
    told = {name: getattr(device, name, None) for name in names}
    told |= {
        "bytes_limit": (device.memory_stats() or {}).get("bytes_limit"),
        "processors": os.cpu_count(),
    }
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "versions": {name: version for name, version in versions.items() if version},
        "told": {name: value for name, value in told.items() if value is not None},
    }


def _function(part):
    module, name = BY_NAME[part].function.split(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)


def answer(request):
    """Figures of a case, or why there are none, as a line."""
    part, case = request["part"], request["case"]
    try:
        return json.dumps({"figures": _function(part)(case)}, allow_nan=False)
    except Exception as error:  # whatever it is, the next row goes on
        said = " ".join(str(error).strip().splitlines())
        return json.dumps({"failed": f"{type(error).__name__}: {said[:600]}"})


def main():
    """Answers until the input ends."""
    # Libraries print; answers have the real output to themselves.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    from jaxkv.machine.compilation import enable_compilation_cache

    if folder := os.environ.get("JAXKV_BENCH_CACHE"):
        enable_compilation_cache(folder)
    print(json.dumps(where()), file=out, flush=True)
    for line in sys.stdin:
        print(answer(json.loads(line)), file=out, flush=True)


if __name__ == "__main__":
    main()
