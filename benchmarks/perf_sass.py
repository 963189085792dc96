"""What a compiled kernel's SASS and a compiled program's sequence of thunks say."""

import dataclasses
import re

_OPERATION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^\.(L_x_\d+):")
_JUMP = re.compile(r"\bBRA\b.*\(\.(L_x_\d+)\)")
_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.\S+")
_GLOBAL = re.compile(r"\bLDG\.\S* R(\d+)")
_WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
# A loop of fewer operations moves nothing: the trap behind a kernel's end, a spin.
_SHORTEST = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's operations, and its loops as pairs of begin and end."""

    operations: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    @property
    def hot(self) -> tuple[int, int] | None:
        """The loop that loads most from memory, of those the innermost; None if no loop loads."""
        weight = lambda loop: (sum(map(width, self.body(loop))), loop[0] - loop[1])  # noqa: E731
        loop = max(self.loops, key=weight, default=None)
        return loop if loop and weight(loop)[0] else None

    def body(self, loop: tuple[int, int]) -> tuple[str, ...]:
        """The operations of a loop."""
        return self.operations[slice(*loop)]


def kernel_of(sass: str) -> Kernel:
    """Reads what nvdisasm writes of one kernel."""
    labels: dict[str, int] = {}
    operations: list[str] = []
    for line in sass.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(operations)
        elif found := _OPERATION.match(line):
            operations.append(found[1])
    loops = []
    for at, operation in enumerate(operations):
        found = _JUMP.search(operation)
        if found and labels.get(found[1], at) <= at - _SHORTEST:
            loops.append((labels[found[1]], at + 1))
    return Kernel(tuple(operations), tuple(loops))


def width(operation: str) -> int:
    """Bytes that a thread loads from memory; 0 if it is no such load."""
    found = _LOAD.search(operation)
    if not found:
        return 0
    return next((size for mark, size in _WIDTHS.items() if mark in found[0]), 4)


def narrow(operations: tuple[str, ...], numbers: int = 0) -> int:
    """Loads of less than 16 bytes a thread, but for so many asynchronous ones of 4 bytes, a row's number each."""
    thin = [each for each in operations if 0 < width(each) < 16]
    return len(thin) - min(numbers, sum("LDGSTS" in each and width(each) == 4 for each in thin))


def left_in_flight(operations: tuple[str, ...]) -> int:
    """Groups of asynchronous copies that the loop's last wait leaves in flight; 0 if it waits for all of them."""
    waits = [
        int(found[1], 16)
        for each in operations
        if (found := re.search(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", each))
    ]
    return max(waits, default=0)


def groups(operations: tuple[str, ...]) -> int:
    """Groups of asynchronous copies that one pass begins."""
    return sum(bool(re.search(r"\bLDGDEPBAR\b", each)) for each in operations)


def rounds(operations: tuple[str, ...]) -> int:
    """Dependent rounds of loads into registers: a load begins a new one if what was loaded before has been used."""
    waited: set[int] = set()
    count = 0
    for operation in operations:
        _, _, rest = re.sub(r"^@\S+\s+", "", operation).partition(" ")
        if waited & {int(each) for each in re.findall(r"\bR(\d+)", rest.partition(",")[2])}:
            waited = set()
        if found := _GLOBAL.search(operation):
            count += not waited
            waited |= {int(found[1]) + i for i in range(max(1, width(operation) // 4))}
    return count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunk:
    """What a program runs: a kernel, a copy, or what holds others.

    Attributes:
        kind: as XLA names it, such as `kCustomKernel`.
        line: where it stands in the dump.
        name: of the kernel; empty for what has none.
        ctas: in the grid.
        threads: of a CTA.
        shared: bytes of a CTA.
        within: those that hold it, outermost first, as (number of the line, kind, branch of a `while`).
    """

    kind: str
    line: int = 0
    name: str = ""
    ctas: int = 0
    threads: int = 0
    shared: int = 0
    within: tuple[tuple[int, str, str], ...] = ()

    @property
    def launches(self) -> bool:
        """Whether it is something that the device begins, not a wrapper of such."""
        return self.kind not in ("kCommandBuffer", "kWhile", "kSequential", "kConditional")

    @property
    def loops(self) -> tuple[tuple[int, str], ...]:
        """The loops that hold it, outermost first: their lines, and whether it is in the body or the condition."""
        return tuple((line, branch) for line, kind, branch in self.within if kind == "kWhile")

    @property
    def in_loop(self) -> bool:
        """Whether it runs for every token."""
        return any(branch == "body" for _, branch in self.loops)

    @property
    def in_branch(self) -> bool:
        """Whether it lies in a branch of a condition, which a token may pass by."""
        return any(kind == "kConditional" for _, kind, _ in self.within)

    @property
    def in_command_buffer(self) -> bool:
        """Whether it is launched as a part of one."""
        return any(kind == "kCommandBuffer" for _, kind, _ in self.within)

    @property
    def product(self) -> bool:
        """Whether it is a matrix product."""
        return self.kind in ("kGemm", "kCublasLtMatmul") or bool(
            re.search(r"gemm|(^|_)dot(_|$)", self.name)
        )


_NUMBERED = re.compile(r"^( *)\d+: (k\w+)\s*(?:\[.*?\])?\s*(.*)$")
_BRANCH = re.compile(r"^\s*(condition|body):\s*$")
_LAUNCH = re.compile(
    r"(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>\d+).*shared_memory: (?P<shared>\d+)"
)


def thunks(text: str) -> list[Thunk]:
    """Reads XLA's dump of a sequence of thunks, wrappers included."""
    found, within, branches = [], [], {}
    for line, written in enumerate(text.splitlines()):
        if branch := _BRANCH.match(written):
            opened = [number for number, kind, _ in within if kind == "kWhile"]
            branches[opened[-1]] = branch[1]
            # What follows lies right below the loop.
            del within[next(i for i, each in enumerate(within) if each[0] == opened[-1]) + 1 :]
            continue
        if not (entry := _NUMBERED.match(written)):
            continue
        indent, kind = len(entry[1]), entry[2]
        within = [each for each in within if each[2] < indent]
        above = tuple((number, holder, branches.get(number, "")) for number, holder, _ in within)
        launch = _LAUNCH.search(entry[3])
        sizes = {}
        if launch:
            ctas = 1
            for size in launch["grid"].split(","):
                ctas *= int(size)
            sizes = {"name": launch["name"], "ctas": ctas}
            sizes |= {"threads": int(launch["threads"]), "shared": int(launch["shared"])}
        each = Thunk(kind=kind, line=line, within=above, **sizes)
        found.append(each)
        if not each.launches:
            within.append((line, kind, indent))
    return found


def loop_launches(sequence: list[Thunk]) -> list[Thunk]:
    """What the device is given for every token, branches of conditions aside."""
    return [each for each in sequence if each.launches and each.in_loop and not each.in_branch]


def conditions(sequence: list[Thunk]) -> list[Thunk]:
    """Conditions that every token decides: those of samplers."""
    return [each for each in sequence if each.kind == "kConditional" and each.in_loop]


def inner_loops(sequence: list[Thunk]) -> list[Thunk]:
    """Loops within the one over tokens, branches of conditions aside."""
    return [
        each for each in sequence if each.kind == "kWhile" and each.in_loop and not each.in_branch
    ]


def times(each: Thunk, trips: dict[int, int]) -> int:
    """How often a token launches it, where `trips` says how often the inner loop at a line of the dump is gone through.

    A loop whose trips are not known there goes through once, and asks its condition before.
    """
    often = 1
    for line, branch in each.loops[1:]:
        if line in trips:
            often *= trips[line] if branch == "body" else 0
    return often


def command_buffers(sequence: list[Thunk]) -> tuple[int, int]:
    """Command buffers that one token takes, and launches outside of them."""
    inside = loop_launches(sequence)
    buffers = {
        next((at for at, kind, _ in each.within if kind == "kCommandBuffer"), None)
        for each in inside
    }
    outside = sum(not each.in_command_buffer for each in inside)
    return len(buffers - {None}), outside
