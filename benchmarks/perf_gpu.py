"""How long a GPU that is not there would take: its constants, and a model of CTAs that share its memory bandwidth.

Everything here is arithmetic on numbers; nothing has been calibrated on a device. The model of the pass over rows:

- CTAs are handed out in the grid's order to the slots of the device (SMs times the CTAs that fit one of them), a new
  one as soon as one is done: list scheduling.
- A CTA first waits for what it must know (dependent loads), then streams its rows, then ends. While it streams, its
  rate is the least of: its even share of the copy bandwidth; its share of what an SM can draw or issue; what its own
  bytes in flight and the latency of memory allow (Little's law); what one pass through its loop takes undisturbed.
"""

import dataclasses
import heapq
import math

MICRO = 1e-6
# Between dependent nodes of a CUDA graph, end to begin: about 1.3 us on Hopper by published microbenchmarks.
LAUNCH = 1.3 * MICRO
# What a kernel of a few CTAs takes beside that: one or two trips to memory.
SMALL = 0.7 * MICRO
# A dependent load that hits L2: 200 to 280 cycles by published microbenchmarks of Hopper.
L2_LATENCY = 0.14 * MICRO
# A load from HBM while the memory is busy; idle it is about 0.55 us.
MEMORY_LATENCY = 0.8 * MICRO
# The whole device's reads from L2: about 5.5 TB/s measured on H100.
L2_BANDWIDTH = 5.5e12
# What an SM takes from L2 in a cycle: 64 bytes on paper, about two thirds of it in copies.
SM_BYTES_PER_CYCLE = 42
# Schedulers of an SM, one instruction of a warp in a cycle each.
SCHEDULERS = 4
# Cycles from one instruction of a warp to its next when the warp has a scheduler for itself: latencies of 4 to 30
# cycles, two or three instructions in flight.
CYCLES_PER_INSTRUCTION = 3
# The host looks at the condition of a `while` outside of command buffers: a copy of one byte, a wait, a launch.
HOST_LOOK = 15 * MICRO
# Registers are allotted in eights a thread; the driver keeps 1 KiB of shared memory for each CTA.
REGISTER_STEP, SHARED_OWN = 8, 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the model knows of a GPU.

    Attributes:
        name: of `aot.DEVICES`.
        sms: multiprocessors.
        copy: bytes a second that a good copy reads and writes, together.
        clock: cycles a second under load.
        products: operations a second of large bfloat16 matrix products.
        memory: bytes that arrays can take.
    """

    name: str
    sms: int = 132
    copy: float
    clock: float = 1.755e9
    products: float = 600e12
    memory: float
    shared: int = 233472
    registers: int = 65536
    threads: int = 2048

    @property
    def little(self) -> float:
        """Bytes in flight per SM at which latency no longer limits bandwidth (Little's law)."""
        return self.copy / self.sms * MEMORY_LATENCY

    def resident(self, *, threads: int, registers: int, shared: int) -> int:
        """CTAs of a kernel that one SM holds."""
        registers = max(1, math.ceil(registers / REGISTER_STEP)) * REGISTER_STEP * threads
        return min(
            self.shared // (shared + SHARED_OWN),
            self.registers // registers,
            self.threads // threads,
            32,
        )


# 90% of the data sheet's bandwidth, which is what copies of hundreds of MiB reach on Hopper. Memory by the data sheets.
DEVICES = {
    "h200": Device(name="h200", copy=0.9 * 4.8e12, memory=141e9),
    "h100": Device(name="h100", copy=0.9 * 3.35e12, memory=80e9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """A kernel whose CTAs stream rows through a loop.

    Attributes:
        resident: CTAs on an SM.
        warps: of a CTA.
        bytes: that one pass through the loop loads.
        instructions: of a warp in one pass.
        flight: bytes of a CTA in flight while it computes.
        rounds: dependent loads before the first row is asked for.
    """

    resident: int
    warps: int
    bytes: int
    instructions: int
    flight: float
    rounds: int


def rate(device: Device, kernel: Stream, active: int) -> float:
    """Bytes a second of each of so many CTAs that stream at once, spread evenly over the SMs."""
    beside = math.ceil(active / device.sms)
    issue = kernel.bytes * SCHEDULERS * device.clock / (kernel.instructions * kernel.warps)
    one_sm = min(SM_BYTES_PER_CYCLE * device.clock, issue) / beside
    alone = kernel.bytes * device.clock / (kernel.instructions * CYCLES_PER_INSTRUCTION)
    return min(device.copy / active, one_sm, kernel.flight / MEMORY_LATENCY, alone)


def streamed(device: Device, kernel: Stream, work: list[float]) -> float:
    """Seconds until CTAs with so many bytes each are done, handed out in this order."""
    if not work:
        return 0.0
    begin = kernel.rounds * L2_LATENCY + MEMORY_LATENCY
    end = L2_LATENCY + kernel.instructions * CYCLES_PER_INSTRUCTION / device.clock
    slots, waiting = device.sms * kernel.resident, list(reversed(work))
    # Those that stream do so at one rate: `moved` is how far each has come that was there from the start, and one is
    # done when it reaches the mark that was set when it began.
    now = moved = last = 0.0
    starting: list[tuple[float, float]] = []
    streaming: list[float] = []
    ending: list[float] = []
    while waiting or starting or streaming or ending:
        while waiting and len(starting) + len(streaming) + len(ending) < slots:
            heapq.heappush(starting, (now + begin, waiting.pop()))
        each = rate(device, kernel, len(streaming)) if streaming else 0.0
        arrives = starting[0][0] if starting else math.inf
        leaves = ending[0] if ending else math.inf
        done = now + (streaming[0] - moved) / each if streaming else math.inf
        then = min(arrives, leaves, done)
        moved += (then - now) * each
        now = then
        if then == done:
            moved = max(moved, heapq.heappop(streaming))
            heapq.heappush(ending, now + end)
        elif then == leaves:
            last = heapq.heappop(ending)
        else:
            heapq.heappush(streaming, moved + heapq.heappop(starting)[1])
    return last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
    """A kernel whose CTAs walk the chunks of one segment each.

    Attributes:
        resident: CTAs on an SM.
        tiles: CTAs of a segment.
        many: chunks that one pass through the loop takes.
        rounds: dependent loads in one pass.
        instructions: of a warp in one pass.
        before: dependent loads before the loop.
    """

    resident: int
    tiles: int
    many: int
    rounds: int
    instructions: int
    before: int


def merged(device: Device, kernel: Merge, counts: list[int], bytes_of_chunk: float) -> float:
    """Seconds until the chunks of segments, so many each, are merged."""
    once = kernel.rounds * L2_LATENCY + kernel.instructions * CYCLES_PER_INSTRUCTION / device.clock
    walks = [
        kernel.before * L2_LATENCY + math.ceil(n / kernel.many) * once + L2_LATENCY for n in counts
    ]
    slots = [0.0] * (device.sms * kernel.resident)
    for walk in walks:
        for _ in range(kernel.tiles):
            heapq.heapreplace(slots, slots[0] + walk)
    return max(max(slots), sum(counts) * bytes_of_chunk / L2_BANDWIDTH)
