"""TPUs by name: figures of their data sheets, and libtpu's names of slices."""

import functools
import math
from typing import ClassVar

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.planning.accelerators import Accelerator, load_data_sheets


@frozen_dataclass
class TPU(Accelerator):
    """A kind of TPU device, as JAX counts devices, with memory, bandwidth and FLOP/s of its data sheet, and slices.

    A chip is one device, except for TPU7x: it has two, each with half of the chip's memory, bandwidth and FLOP/s.

    Attributes:
        devices: JAX devices per chip.
        slices: chips along each side of a slice, such as `2x4`, the smallest slice first.
    """

    word: ClassVar[str] = "TPU"
    platform: ClassVar[str] = "tpu"

    devices: int
    slices: tuple[str, ...]

    def find_slice(self, count: int) -> str:
        """Return the name, such as `v6e:2x4`, of libtpu's smallest slice for `count` devices; ValueError if none."""
        sizes = [self.devices * math.prod(map(int, sides.split("x"))) for sides in self.slices]
        remedy = f"too many: use at most {sizes[-1]}, the largest slice"
        require(count <= sizes[-1], "gpus", f"{self.name}x{count}", remedy)
        found = next(sides for sides, size in zip(self.slices, sizes, strict=True) if size >= count)
        return f"{self.name}:{found}"


@functools.cache
def tpus() -> dict[str, TPU]:
    """Return a dict of every known `TPU` by name, read from the packaged data sheets; cached."""
    return load_data_sheets("tpus.json", TPU)
