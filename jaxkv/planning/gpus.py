"""GPUs by name: figures of their data sheets, and XLA's target config to compile for them."""

import dataclasses
import difflib
import functools
import json
import re
from importlib import resources
from typing import Any

from jaxkv._errors import require
from jaxkv._values import is_whole

_COUNTED = re.compile(r"(?P<kind>.+?)\s*[x:*]\s*(?P<count>[0-9]+)")
_COUNTED_BEFORE = re.compile(r"(?P<count>[0-9]+)\s*(?:[x:*]\s*|\s)(?P<kind>.+)")
_TARGET = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: {l2} clock_rate_ghz: {ghz} device_memory_size: {reported} shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 driver_version: "13.0.0" runtime_version: "13.0.0" }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{description}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU:
    """A kind of GPU: memory bytes, bandwidth, FLOP/s and other figures of its data sheet and of the driver.

    Attributes:
        name: as users write it.
        description: as the driver names it.
        aliases: other spellings of the name.
        memory: bytes, the data sheet's decimal gigabytes; drivers report some percent more, which goes to contexts,
            communication buffers and fragmentation.
        reported: bytes that the driver reports.
        bandwidth: of the memory, bytes/s.
        products: dense bfloat16 matrix products with float32 sums, FLOP/s.
        link: to another GPU of the host, bytes/s in one direction: NVLink, or PCIe where there is none.
        network: to a GPU of another host, bytes/s in one direction, as NVIDIA's own systems have it.
        per_host: GPUs of a host.
        capability: CUDA's compute capability, (major, minor).
        cores: multiprocessors.
        fpus: float32 lanes of a multiprocessor.
        clock: boost clock, Hz.
        l2: bytes of the L2 cache.
        shared_core: bytes of shared memory of a multiprocessor.
        shared: bytes of shared memory that a block can request.
        threads: resident threads of a multiprocessor.
        sources: addresses of the figures' sources.
    """

    name: str
    description: str
    aliases: tuple[str, ...]
    memory: int
    reported: int
    bandwidth: int
    products: int
    link: int
    network: int
    per_host: int
    capability: tuple[int, int]
    cores: int
    fpus: int
    clock: int
    l2: int
    shared_core: int
    shared: int
    threads: int
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is int:
                value = getattr(self, field.name)
                require(is_whole(value, 1), field.name, value, "give a positive whole number, as the data sheet has it")

    @property
    def architecture(self) -> str:
        """Architecture name for ptxas as text, such as `sm_90a`."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' * (major >= 9)}"

    @property
    def target(self) -> str:
        """XLA's target config of this GPU as text, with which programs are compiled without the GPU."""
        major, minor = self.capability
        return _TARGET.format(major=major, minor=minor, ghz=self.clock / 1e9, **dataclasses.asdict(self))


@functools.cache
def gpus() -> dict[str, GPU]:
    """Reads the packaged data sheets; returns a dict of every known `GPU` by name, cached."""
    data = json.loads(resources.files(__package__).joinpath("data/gpus.json").read_text("utf-8"))
    found = {}
    for name, given in data.items():
        figures: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        found[name] = GPU(name=name, **figures)
    return found


def gpu_named(name: str) -> GPU:
    """`GPU` of a name or alias in any case; ValueError with the nearest names if it is unknown."""
    require("," not in name, "gpus", name, "a plan is of one kind of GPU: make a plan for each")
    known = {spelling: gpu for gpu in gpus().values() for spelling in (gpu.name, *gpu.aliases)}
    spelled = _spelled(name)
    near = difflib.get_close_matches(spelled, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    require(spelled in known, "gpus", name, f"no such GPU; known ones: {', '.join(gpus())}{hint}")
    return known[spelled]


def _spelled(name: str) -> str:
    """Text of a GPU's name as the data sheets' file spells it: lower case, with hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def gpus_named(given: str) -> tuple[GPU, int]:
    """(`GPU`, count) of a text such as `h100x8`, `8xh100`, `h100:8` or `8 h100`; of `h100` alone with count 1."""
    if not isinstance(given, str):
        raise TypeError(f"gpus={given!r}: give a kind and how many, 'h100x8' say")
    text, known = given.strip().lower(), {each for gpu in gpus().values() for each in (gpu.name, *gpu.aliases)}
    # Names have letters and digits of their own: rtx4090.
    read = [] if text in known else [each.fullmatch(text) for each in (_COUNTED, _COUNTED_BEFORE)]
    found = [match for match in read if match is not None]
    if not found:
        return gpu_named(given), 1
    # Of two readings, as of 2x4090, the one whose kind is known.
    match = next((each for each in found if _spelled(each["kind"]) in known), found[0])
    kind, count = match["kind"], match["count"]
    remedy = f"give 1 or more of them, {kind}x8 say; fewer than a million"
    require(0 < len(count) <= 6 and int(count) > 0, "gpus", given, remedy)
    return gpu_named(kind), int(count)
