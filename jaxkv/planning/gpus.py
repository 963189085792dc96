"""NVIDIA GPUs by name: figures of their data sheets, and XLA's target config to compile for them."""

import dataclasses
import functools
from typing import ClassVar

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.planning.accelerators import Accelerator, load_data_sheets

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


@frozen_dataclass
class GPU(Accelerator):
    """A kind of NVIDIA GPU: memory, bandwidth, FLOP/s and other figures of its data sheet and of the driver.

    Attributes:
        capability: CUDA's compute capability, (major, minor).
        cores: number of multiprocessors.
        fpus: float32 lanes per multiprocessor.
        clock: boost clock in Hz.
        l2: bytes of the L2 cache.
        shared_core: bytes of shared memory per multiprocessor.
        shared: bytes of shared memory that a block can request.
        threads: resident threads per multiprocessor.
    """

    word: ClassVar[str] = "GPU"
    platform: ClassVar[str] = "cuda"

    capability: tuple[int, int]
    cores: int
    fpus: int
    clock: int
    l2: int
    shared_core: int
    shared: int
    threads: int

    @property
    def architecture(self) -> str:
        """Architecture name of this GPU for NVIDIA's assembler ptxas, such as `sm_90a`."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' * (major >= 9)}"

    @property
    def xla_target_config(self) -> str:
        """XLA's target config of this GPU as text, with which programs compile without the GPU."""
        major, minor = self.capability
        return _TARGET.format(
            major=major, minor=minor, ghz=self.clock / 1e9, **dataclasses.asdict(self)
        )


@functools.cache
def gpus() -> dict[str, GPU]:
    """Return a dict of every known `GPU` by name, read from the packaged data sheets; cached."""
    return load_data_sheets("gpus.json", GPU)
