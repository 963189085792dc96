"""Decode steps of Llama 3 8B in the performance model: the loop that users run, compiled for a GPU that is not there.

A step is the body of `jaxkv.engine.loop`'s `while`. Its launches are counted in XLA's sequence of thunks; its time is
the sum of

- matrix products: the weights' bytes at copy bandwidth, or their operations where a large batch takes longer, and a
  launch each. Compiled without a device they are not tuned: their own code says nothing;
- the passes over rows and the merges, by `perf_gpu`, with a launch each;
- every other kernel: a launch and the least that a small kernel takes, and the bytes that all of them name, pools and
  weights aside, at copy bandwidth. That none of them overlap is on the safe side;
- a look of the host at the loop's condition, where the loop is not in a command buffer as a whole.
"""

import dataclasses
import re

import aot
import aot_sharded
import perf_decode
import perf_gpu
import perf_sass

from benchmarks import hlo

BUDGET, NEW, GROUP, DIM, HEADS = 1024, aot_sharded.NEW, 4, 128, 8
# Launches a layer that a policy's step may take.
LAUNCHES = {
    "FullKV": 12,
    "SnapKV": 12,
    "AdaKV": 12,
    "PyramidKV": 12,
    "H2O": 16,
    "D2O": 16,
    "OmniKV": 12,
}
# Temporaries, as a share of the pools; of a single sequence the logits alone are as much as 1024 rows a head.
TEMPORARIES, FEW = 0.01, 8
LAYERS, SMALL, LESS = 32, 8, 4
# OmniKV's filters of Llama 3 8B, and of the models with fewer layers that launches are counted with.
FILTERS = {LAYERS: (2, 8, 18), SMALL: (1,), LESS: (1,)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compiled; with `slots`, every sequence has a sampler and eight end ids of its own, as in an engine."""

    policy: str
    batch: int
    tokens: int
    layers: int = LAYERS
    slots: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a compiled loop says; times are seconds, sizes bytes.

    Attributes:
        setting: what was compiled.
        launches: of one token.
        buffers: command buffers of one token.
        outside: launches outside of command buffers.
        inner: loops within the one over tokens.
        conditions: of samplers, whose branches no greedy sequence takes.
        pools: keys, values, positions and scores.
        temporaries: beside arguments and results.
        copies: of a pool.
        time: of a step.
        attention: of that, the passes over rows and the merges.
        ideal: weights and rows at copy bandwidth.
        largest: sequences that fit the device beside the whole model; 0 for a model cut short.
        largest_time: of their step.
        wrong: what the rules say of the kernels in the loop.
    """

    setting: Setting
    launches: int
    buffers: int
    outside: int
    inner: int
    conditions: int
    pools: int
    temporaries: int
    copies: int
    time: float
    attention: float
    ideal: float
    largest: int
    largest_time: float
    wrong: tuple[str, ...]


def policy_of(setting):
    """The policy of a setting."""
    import jaxkv

    options = {} if setting.policy == "FullKV" else {"budget": BUDGET}
    if setting.policy == "OmniKV":
        options["filter_layers"] = FILTERS[setting.layers]
    return getattr(jaxkv, setting.policy)(**options)


@dataclasses.dataclass(frozen=True)
class Use:
    """A launch of one of our kernels: its name, rows of the pool that it is given, and how many of them are picked.

    None are picked where a layer reads all: OmniKV's below the first filter, its filters, and those right behind them.
    """

    name: str
    rows: int
    picked: int = 0


def lengths_of(setting, use, batch):
    """What a layer reads of its segments: all tokens, the budget, or what is picked; AdaKV's heads differ.

    The step is the first after the prompt: of the rows that are read without being picked there are none yet.
    """
    if use.picked:
        return perf_decode.even(batch, HEADS, min(use.picked, setting.tokens))
    rows = use.rows // HEADS
    mean = setting.tokens if rows >= setting.tokens else min(rows, BUDGET)
    if setting.policy == "AdaKV":
        weights = [1 + 3 * h % 10 for h in range(HEADS)]
        return (tuple(mean * HEADS * weight // sum(weights) for weight in weights),) * batch
    return perf_decode.even(batch, HEADS, mean)


def calls(text, inside):
    """Our kernels that a token launches, in order, as `Use`."""
    given = []
    for line in body_of(text):
        if 'custom_call_target="__gpu$xla.gpu.triton"' in line:
            arrays = hlo.arrays_in(
                line.partition("operand_layout_constraints=")[2].partition("}}")[0]
            )
            rows = [
                sizes[1] for kind, sizes in arrays if kind in ("bf16", "f16") and len(sizes) == 3
            ]
            # Lists of picked rows `[B, k, T]` are the one table of three dimensions.
            picked = [sizes[2] for kind, sizes in arrays if kind == "s32" and len(sizes) == 3]
            given.append(
                (
                    re.search(r', name = "(\w+)"', line)[1],
                    max(rows, default=0),
                    max(picked, default=0),
                )
            )
    ours = {name for name, *_ in given}
    launched = [each.name for each in inside if plain(each.name) in ours]
    assert [plain(name) for name in launched] == [name for name, *_ in given], (launched, given)
    return [Use(name, *sizes) for name, (_, *sizes) in zip(launched, given, strict=True)]


def plain(name):
    """A kernel's name as it was given: what has several shapes is numbered."""
    return re.sub(r"__\d+$", "", name)


def body_of(text):
    """Lines of the computation that a program's outermost loop repeats."""
    entry = text[text.index("\nENTRY ") :]
    name = re.search(r" while\(.*body=(%[\w.\-]+)", entry)[1]
    begin = text.index(f"\n{name} (")
    return text[begin : text.index("\n}", begin)].splitlines()[2:]


def trips_of(text, sequence):
    """How often inner loops are gone through, by their line among the thunks, where the compiler knows that."""
    whiles = [line for line in body_of(text) if " while(" in line]
    known = [re.search(r'known_trip_count":\{"n":"(\d+)"', line) for line in whiles]
    inner = [each for each in perf_sass.inner_loops(sequence) if len(each.loops) == 1]
    return {each.line: int(found[1]) for each, found in zip(inner, known, strict=True) if found}


def moved(lines, pools, keys):
    """Bytes that a loop's kernels name beside attention: what they read and write, pools and weights aside.

    Args:
        lines: of the loop's body.
        pools: bytes of a pool's arrays; what has as many is written in place, a few rows of it.
        keys: of them those of keys and values: a matrix product that is given one reads it.
    """
    sizes, total, carried = {}, 0, set()
    for line in lines:
        named = re.match(r"\s*(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)", line)
        if not named:
            continue
        name, result, operation, operands = named.groups()
        sizes[name] = sum(
            hlo.size_of(*each) for each in hlo.arrays_in(result) if each[0] in hlo.BYTES
        )
        given = re.findall(r"%[\w.\-]+", operands)
        if operation in ("get-tuple-element", "bitcast") and "bf16" in result:
            carried.add(name)
        elif operation == "custom-call" and "/ragged_" not in line:
            total += sum(
                sizes.get(each, 0)
                for each in given
                if sizes.get(each) not in pools and each not in carried
            )
        elif operation != "fusion" or re.search(r"scatter|dynamic_update_slice", name):
            continue
        elif re.search(r"gemm|dot", name):
            # A filter's scores: keys are read once more, beside attention, and a logit of each query and row goes out.
            read = sum(sizes.get(each, 0) for each in given if sizes.get(each) in keys)
            total += read + sizes[name] * bool(read)
        else:
            total += sizes[name] + sum(sizes.get(each, 0) for each in given if each not in carried)
    return total


def in_slots(work, slots=True):
    """The work of an engine's loop, whose sequences have samplers and end ids of their own; `work` unless `slots`."""
    from jaxkv.sampling import Greedy, mixed

    return (
        dataclasses.replace(work, sampling=mixed([Greedy()] * work.batch), ends=8)
        if slots
        else work
    )


def compile_loop(setting, device):
    """The loop of a setting, compiled; its text is the one with layouts and schedules."""
    import jax
    import shapes

    from jaxkv.planning.programs import Work, abstract_model, traced_loop

    flat = abstract_model(shapes.llama_3_8b(setting.layers))
    sharding = aot.sharding_for(device.name)
    given = {"batch": setting.batch, "tokens": setting.tokens, "new": NEW, "sharding": sharding}
    work = in_slots(Work(flat=flat, policy=policy_of(setting), **given), setting.slots)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        traced, pools = traced_loop(work)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    return compiled, pools, flat


def passed(kernels, loop, use, setting, batch, device):
    """An estimate of a loop's pass over rows and its merge."""
    lengths = lengths_of(setting, use, batch)
    work, counts = perf_decode.chunks_of(kernels, lengths, group=GROUP, dim=DIM, pool_rows=use.rows)
    passing, merging = loop.found[use.name], perf_decode.pair(loop.found)[1]
    # Logits are kept where they are to become scores.
    written = GROUP * 4 if any("STG" in each for each in passing.code.body(passing.code.hot)) else 0
    shape = {
        "group": GROUP,
        "dim": DIM,
        "segments": batch * HEADS,
        "written": written,
        "picked": bool(use.picked),
    }
    return perf_decode.estimate(device, passing, merging, work, counts, **shape)


def attention_time(kernels, loop, setting, batch, device):
    """Seconds of a step's passes over rows and merges, and of our other kernels."""
    attention = others = 0.0
    last, known = None, {}
    for use in loop.uses:
        if use.name.startswith("ragged_decode_merge"):
            attention += last.merge + perf_gpu.LAUNCH
        elif use.name.startswith("ragged_decode"):
            if use not in known:
                known[use] = passed(kernels, loop, use, setting, batch, device)
            last = known[use]
            attention += last.rows + perf_gpu.LAUNCH
        else:
            # Scores: a logit of each query and row, and the sum that it is added to.
            data = (
                batch * HEADS * BUDGET * (GROUP * 4 + 8)
                if use.name.startswith("ragged_mass")
                else 0
            )
            others += perf_gpu.LAUNCH + perf_gpu.SMALL + data / device.copy
    return attention, others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A compiled loop, read: what a token launches and how often, and our kernels in it."""

    inside: list
    often: list
    uses: list
    found: dict
    other_bytes: int
    weights: int
    looks: int
    conditions: int

    def seconds(self, kernels, setting, batch, device):
        """Of a step of so many sequences, and of that its attention."""
        attention, others = attention_time(kernels, self, setting, batch, device)
        ours = {use.name for use in self.uses}

        def count(wanted):
            return sum(n for each, n in zip(self.inside, self.often, strict=True) if wanted(each))  # noqa: E731

        products = count(lambda each: each.product)
        small = count(lambda each: not each.product and each.name not in ours)
        # A multiplication and an addition for each weight, of two bytes, and sequence.
        time = (
            max(self.weights / device.copy, self.weights * batch / device.products)
            + products * perf_gpu.LAUNCH
        )
        time += attention + others + small * (perf_gpu.LAUNCH + perf_gpu.SMALL)
        time += (
            self.other_bytes * batch / setting.batch / device.copy + self.looks * perf_gpu.HOST_LOOK
        )
        # The device decides a condition by a kernel of its own.
        time += self.conditions * (perf_gpu.LAUNCH + perf_gpu.SMALL)
        return time, attention


def size_of(tree):
    """Bytes of arrays."""
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def read_loop(dump, text, pools, weights):
    """What XLA and ptxas left of a loop."""
    import jax

    sequence = perf_decode.sequence(dump)
    inside, trips = perf_sass.loop_launches(sequence), trips_of(text, sequence)
    loops = [each for each in sequence if each.kind == "kWhile" and not each.in_branch]
    leaves = jax.tree.leaves(pools)
    # A loop whose trips are not known is asked for its condition, by the host unless it is in a command buffer.
    looks = sum(each.line not in trips and not each.in_command_buffer for each in loops)
    keys = {leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim == 3}
    loop = Loop(
        inside=inside,
        often=[perf_sass.times(each, trips) for each in inside],
        uses=calls(text, [each for each in inside if len(each.loops) == 1]),
        found=perf_decode.found_in(dump, ("ragged_",)),
        other_bytes=moved(body_of(text), {size_of(leaf) for leaf in leaves}, keys),
        weights=weights,
        looks=looks,
        conditions=len(perf_sass.conditions(sequence)),
    )
    return loop, sequence


def run(setting, device):
    """Compiles a setting's loop and puts it into the model."""
    import jax

    from jaxkv import pallas_kernels

    dump = perf_decode.emptied()
    compiled, pools, flat = compile_loop(setting, device)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    held = size_of((flat.ends, flat.blocks))
    # Of the table that tokens are looked up in, a row is read.
    weights = held - flat.config.vocab * flat.config.embed * 2
    loop, sequence = read_loop(dump, text, pools, weights)
    buffers, outside = perf_sass.command_buffers(sequence)
    arrays = {(hlo.NAMES[leaf.dtype.name], tuple(leaf.shape)) for leaf in jax.tree.leaves(pools)}
    temporaries = memory.temp_size_in_bytes
    beside = temporaries + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    whole = setting.layers == LAYERS
    largest = (
        int((device.memory - held) // ((size_of(pools) + beside) / setting.batch)) if whole else 0
    )
    time, attention = loop.seconds(pallas_kernels, setting, setting.batch, device)
    passes = [use for use in loop.uses if plain(use.name) == "ragged_decode"]
    read = sum(sum(map(sum, lengths_of(setting, use, setting.batch))) for use in passes)
    return Step(
        setting=setting,
        launches=sum(loop.often),
        buffers=buffers,
        outside=outside,
        inner=len(perf_sass.inner_loops(sequence)),
        conditions=loop.conditions,
        pools=size_of(pools),
        temporaries=temporaries,
        copies=hlo.copies(text, arrays),
        time=time,
        attention=attention,
        ideal=(weights + read * DIM * 2 * 2) / device.copy,
        largest=largest,
        largest_time=loop.seconds(pallas_kernels, setting, largest, device)[0] if largest else 0.0,
        wrong=wrong_with({use.name: bool(use.picked) for use in passes}, loop.found, device),
    )


def wrong_with(passes, found, device):
    """What is wrong with passes over rows: `passes` says by name whether a loop's kernels read picked rows."""
    wrong = []
    for name, picked in sorted(passes.items()):
        numbers = perf_decode.row_numbers(found[name], DIM) if picked else 0
        wrong += [
            f"{name}: {each}" for each in perf_decode.kernel_faults(found[name], device, numbers)
        ]
    return tuple(wrong)


def per_layer(steps):
    """Launches a layer of a policy: of the steps with most and with fewest layers."""
    most = max(steps, key=lambda step: step.setting.layers)
    least = min(steps, key=lambda step: step.setting.layers)
    return (most.launches - least.launches) / (most.setting.layers - least.setting.layers)


def temporaries_of(steps, layers=LAYERS):
    """Temporaries of a step of so many layers, as a share of its pools; of models cut short, by how they grow."""
    most = max(steps, key=lambda step: step.setting.layers)
    least = min(steps, key=lambda step: step.setting.layers)
    growing = most.setting.layers - least.setting.layers
    each = (most.temporaries - least.temporaries) / growing if growing else 0.0
    missing = layers - most.setting.layers
    return (most.temporaries + each * missing) / (most.pools * layers / most.setting.layers)


def faults(steps):
    """Which rules the step of a policy breaks, compiled for one or two numbers of layers."""
    step = max(steps, key=lambda step: step.setting.layers)
    wrong = list(step.wrong)
    if step.buffers != 1 or step.outside:
        wrong.append(
            f"the loop's body is {step.buffers} command buffers and {step.outside} launches, not one"
        )
    if step.copies:
        wrong.append(f"copies a pool {step.copies} times")
    share = temporaries_of(steps)
    if share >= TEMPORARIES and step.setting.batch >= FEW:
        wrong.append(f"temporaries are {share:.1%} of the pools")
    return wrong


def too_many(policy, launches):
    """What is wrong with a policy's launches a layer."""
    limit = LAUNCHES[policy]
    return [f"{launches:.1f} launches a layer, more than {limit}"] if launches > limit else []
