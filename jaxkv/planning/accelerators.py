"""Data sheets of GPUs and TPUs, packaged with jaxkv: memory, bandwidth, FLOP/s and links."""

import json
from importlib import resources
from typing import Any, ClassVar, TypeVar

from jaxkv._dataclasses import frozen_dataclass


@frozen_dataclass
class Device:
    """A kind of device by name and bytes of memory: this machine's CPU; base class of `Accelerator`.

    Attributes:
        word: "CPU", "GPU" or "TPU", for texts.
        platform: JAX platform that its programs are lowered for.
        name: name that users write.
        memory: bytes of memory, from the data sheet's decimal gigabytes; of a CPU the free bytes. Drivers report some
            percent more, which contexts, communication buffers and fragmentation use.
        retiles: True if loops read 16-bit arrays in other tiles than program arguments have, so that the compiler
            copies them: all weights for a decode loop, hidden states for each of a prefill layer's three loops.
    """

    word: ClassVar[str] = "CPU"
    platform: ClassVar[str] = "cpu"

    name: str
    memory: int
    retiles: bool = False


@frozen_dataclass
class Accelerator(Device):
    """A kind of GPU or TPU: memory, bandwidth, FLOP/s and links of its data sheet; base class of `GPU` and `TPU`.

    Attributes:
        description: name that the driver reports.
        aliases: other spellings of the name.
        reported: bytes of memory that the driver, or the compiler of a TPU, reports.
        bandwidth: memory bandwidth in bytes/s.
        products: dense bfloat16 matrix products with float32 sums, in FLOP/s.
        link: bandwidth to neighbours in bytes/s per direction: NVLink, else PCIe; for a TPU, the sum of its links.
        network: bandwidth to a GPU of another host, or a TPU of another pod, in bytes/s per direction.
        per_host: GPUs per host; TPU devices per pod, all connected by links.
        sources: URLs of the data sheets.
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
        """All texts by which users select this kind of device: its name and its aliases."""
        return self.name, *self.aliases


Kind = TypeVar("Kind", bound=Accelerator)


def load_data_sheets(file: str, kind: type[Kind]) -> dict[str, Kind]:
    """Read a packaged JSON file of data sheets; return a dict of devices, instances of `kind`, by name."""
    data = json.loads(resources.files(__package__).joinpath("data", file).read_text("utf-8"))
    found = {}
    for name, given in data.items():
        figures: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        found[name] = kind(name=name, **figures)
    return found
