"""Figures that plans need of GPUs and TPUs: memory, bandwidth, FLOP/s and links, read from packaged data sheets."""

import dataclasses
import json
from importlib import resources
from typing import Any, ClassVar, TypeVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device: its name and the bytes of its memory; this machine's CPU, or base of `Accelerator`.

    Attributes:
        word: "CPU", "GPU" or "TPU", as texts call it.
        platform: JAX's name of the platform that its programs are lowered for.
        name: as users write it.
        memory: bytes, the data sheet's decimal gigabytes; drivers report some percent more, which goes to contexts,
            communication buffers and fragmentation. Of a CPU those that are free.
        retiles: True if loops read 16-bit arrays in other tiles than those of a program's arguments, so that the
            compiler copies these: all weights for a decode loop, hidden states for each of a prefill layer's three.
    """

    word: ClassVar[str] = "CPU"
    platform: ClassVar[str] = "cpu"

    name: str
    memory: int
    retiles: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator(Device):
    """A kind of GPU or TPU: memory bytes, bandwidth, FLOP/s and links of its data sheet; base of `GPU` and `TPU`.

    Attributes:
        description: as the driver names it.
        aliases: other spellings of the name.
        reported: bytes that the driver, or the compiler of a TPU, reports.
        bandwidth: of the memory, bytes/s.
        products: dense bfloat16 matrix products with float32 sums, FLOP/s.
        link: to its neighbours, bytes/s in one direction: NVLink, or PCIe where there is none; of a TPU, all its links.
        network: to a GPU of another host, or a TPU of another pod, bytes/s in one direction.
        per_host: GPUs of a host; TPU devices of a pod, all of which links join.
        sources: addresses of the figures' sources.
    """

    description: str
    aliases: tuple[str, ...]
    reported: int
    bandwidth: int
    products: int
    link: int
    network: int
    per_host: int
    sources: tuple[str, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        """Tuple of all texts that select this kind: its name and aliases."""
        return self.name, *self.aliases


Kind = TypeVar("Kind", bound=Accelerator)


def sheets(file: str, kind: type[Kind]) -> dict[str, Kind]:
    """Read a packaged JSON file of data sheets; return a dict of its devices, of class `kind`, by name."""
    data = json.loads(resources.files(__package__).joinpath("data", file).read_text("utf-8"))
    found = {}
    for name, given in data.items():
        figures: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        found[name] = kind(name=name, **figures)
    return found
