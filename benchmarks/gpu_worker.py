"""The process that measures: reads requests from its standard input, a JSON object a line, and answers on the output.

    python -m benchmarks.gpu_worker PARTS        the module that names the parts: gpu_parts or tpu_parts

Whatever else is printed goes to the standard error. It ends when its input does, or when who started it is gone.
"""

import concurrent.futures
import importlib
import json
import os
import sys
import threading
import time
from importlib import metadata

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax")
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
    known = importlib.import_module(f"benchmarks.{sys.argv[1]}").BY_NAME.get(part)
    module, name = (
        known.function.split(":") if known else ("tune_kernels", part.removeprefix("tune_"))
    )
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)


class Ahead:
    """Programs that are compiled in other threads while this one measures."""

    def __init__(self):
        # Compilers leave Python's lock alone; the device is left to the thread that measures.
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(1, min(12, (os.cpu_count() or 2) - 2))
        )
        self._begun = {}

    def start(self, part, cases):
        """Begins to compile what is not compiled yet."""
        for case in cases:
            name = json.dumps([part, case], sort_keys=True)
            if name not in self._begun:
                self._begun[name] = self._threads.submit(_function(part).prepare, case)

    def compiling(self):
        """Whether something is still being compiled."""
        return not all(each.done() for each in self._begun.values())

    def take(self, part, case):
        """What has been prepared for a case, once."""
        self.start(part, [case])
        return self._begun.pop(json.dumps([part, case], sort_keys=True)).result()


def answer(request, ahead):
    """Figures of a case, or why there are none, as a line."""
    part, case = request["part"], request["case"]
    try:
        measure = _function(part)
        if hasattr(measure, "prepare"):
            prepared = ahead.take(part, case)
            ahead.start(part, request["ahead"])
            figures = measure(case, prepared)
        else:
            figures = measure(case)
        return json.dumps({"figures": figures}, allow_nan=False)
    except Exception as error:  # whatever it is, the next row goes on
        said = " ".join(str(error).strip().splitlines())
        return json.dumps({"failed": f"{type(error).__name__}: {said[:600]}"})


def main():
    """Answers until the input ends."""
    # Libraries print; answers have the real output to themselves.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    from jaxkv.compilation import enable_compilation_cache

    if folder := os.environ.get("JAXKV_BENCH_CACHE"):
        enable_compilation_cache(folder)
    ahead = Ahead()
    print(json.dumps(where()), file=out, flush=True)
    for line in sys.stdin:
        print(answer(json.loads(line), ahead), file=out, flush=True)
    out.flush()
    if ahead.compiling():
        os._exit(0)  # nobody asks for it any more


if __name__ == "__main__":
    main()
