"""Compiles OmniKV's staged step and its prefill, 450,000 tokens long, for GPUs that are not there.

    .venv-aot/bin/python benchmarks/aot_offload.py [--out benchmarks/results/aot_offload.md]

Llama 3 8B's shape, bfloat16, batch 1, filter layers 2, 8 and 18, 2048 tokens read. What the device must hold are the
weights, the rows of layers that read everything, the rows of one stage, and the largest program's temporaries; the
other layers' rows are the host's. It fails where that passes 80 GB, or where a program copies a pool. Needs .venv-aot
(`make aot` makes it).
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import aot

TOKENS = 450_000
ROOM = 256
LIMIT = 80e9


def measure(device):
    """Lines of a table, and faults."""
    import jax
    import jax.numpy as jnp
    import shapes

    from jaxkv import OmniKV
    from jaxkv.attention import Implementation
    from jaxkv.cache import State, Tables
    from jaxkv.cache.layout import Layout
    from jaxkv.cache.pools import dense_pool
    from jaxkv.engine import staged
    from jaxkv.engine.lengths import bucket
    from jaxkv.engine.prefill_layer import layer
    from jaxkv.engine.sparse import Chosen
    from jaxkv.engine.spec import Spec
    from jaxkv.models.rope import angles
    from jaxkv.planning.programs import abstract_model
    from jaxkv.policies.scorer import Needs

    config, of = shapes.llama_3_8b(), jax.ShapeDtypeStruct
    flat, slots = abstract_model(config), bucket(TOKENS)
    policy = OmniKV(filter_layers=(2, 8, 18), budget=2048, offload=True)
    reading = policy.parts().reading(config.windows, slots)
    spec = Spec(
        graphs=flat.graphs,
        config=config,
        layout=Layout.EQUAL,
        rolling=False,
        reading=reading,
        implementation=Implementation.PALLAS,
    )
    heads, dim = config.kv_heads, config.head_dim
    weigh = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731

    def pool_of(index):
        rows = heads * (ROOM + (1 if index in reading.offloaded else slots))
        row = of((1, rows, dim), jnp.bfloat16)
        return dense_pool(row, row, of((1, rows), jnp.int32))

    pools = [pool_of(index) for index in range(config.layers)]
    table, one = of((config.layers, 1, heads), jnp.int32), of((1,), jnp.int32)
    state = State(prompt=one, budget=one, recent=of((config.layers, 1), jnp.int32), choosable=table)
    tables = Tables(start=table, length=table, limit=table, seen=one, state=state)
    weights, held = weigh((flat.ends, flat.blocks)), weigh(pools)
    lines, faults, temps, most = [], [], [], 0
    for part in staged.stretches(reading, config.windows, whole=False):
        loaded = chosen = None
        if part.loaded:
            loaded = of((1, len(part.layers), reading.width, 2, heads, dim), jnp.bfloat16)
            chosen = Chosen(positions=of((1, reading.width), jnp.int32), count=one)
            most = max(most, weigh(loaded))
        every = part.layers if part.ask is None else (*part.layers, part.ask)
        given = staged.Inputs(
            blocks=tuple(flat.blocks[index] for index in every),
            rings=(None,) * len(every),
            layers=of((len(every),), jnp.int32),
            filter=None if part.ask is None else pools[part.ask],
            loaded=loaded,
            chosen=chosen,
        )

        def run(mine, given, tables, x, count, every=every):
            kinds = (config.spec_of(0),) * len(every)
            return staged.run_stretch(mine, given, tables, x, count, spec=spec, kinds=kinds)

        mine = tuple(pools[index] for index in part.layers)
        inputs = (mine, given, tables, of((1, 1, config.embed), jnp.bfloat16), one)
        compiled = aot.compile_for(device, run, *inputs, donate=(0,))
        temps.append(compiled.memory_analysis().temp_size_in_bytes)
        copies = sum(
            len(re.findall(rf"= bf16\[1,{rows},{dim}\]\S* copy\(", compiled.as_text()))
            for rows in {pool.k.shape[1] for pool in pools}
        )
        if copies:
            faults.append(f"{device}: layers {part.layers} copy a pool {copies} times")
        reads = "read what was sent" if part.loaded else "read everything"
        asked = "" if part.ask is None else f", then filter {part.ask} is asked"
        lines.append(
            f"| layers {_span(part.layers)} {reads}{asked} | {temps[-1] / 2**20:.0f} MiB | {copies} |"
        )
    step = weights + held + 2 * most + max(temps)

    def prefill_layer(x, leaves, length):
        options = {
            "graphs": flat.graphs,
            "needs": Needs(),
            "last": False,
            "implementation": Implementation.PALLAS,
        }
        table = angles(jnp.arange(slots, dtype=jnp.int32)[None], config.rope, config.head_dim)
        return layer(leaves, x, length, table, **options)

    hidden = of((1, slots, config.embed), jnp.bfloat16)
    memory = aot.compile_for(
        device, prefill_layer, hidden, flat.blocks[0], one, donate=(0,)
    ).memory_analysis()
    layer_kv = 2 * heads * slots * dim * 2
    # Beside the program's own: a layer's rows by token, and those of the layer before on their way to the host.
    prefill = (
        weights + held + memory.temp_size_in_bytes + memory.output_size_in_bytes + 2 * layer_kv
    )
    lines.append(
        f"| prefill of one layer, {slots} slots | {memory.temp_size_in_bytes / 2**20:.0f} MiB | - |"
    )
    bank = len(reading.offloaded) * layer_kv
    total = (
        f"weights {weights / 1e9:.1f} GB, whole layers' rows {held / 1e9:.1f} GB, a stage's {most / 1e6:.0f} MB; "
        f"a step needs {step / 1e9:.1f} GB, the prefill {prefill / 1e9:.1f} GB, the host {bank / 1e9:.1f} GB."
    )
    for name, needed in (("step", step), ("prefill", prefill)):
        if needed > LIMIT:
            faults.append(
                f"{device}: the {name} needs {needed / 1e9:.1f} GB, more than {LIMIT / 1e9:.0f}"
            )
    head = [f"Llama 3 8B's shape, bfloat16, {TOKENS:,} tokens, {device}: {total}", ""]
    return [*head, "| program | temporaries | pool copies |", "|---|---|---|", *lines], faults


def _span(layers):
    return f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else str(layers[0])


def main():
    """Compiles, prints, exits with 1 if something does not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h100", choices=aot.DEVICES)
    parser.add_argument("--out", type=Path, help="write the table here as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        aot._start(folder)
        lines, faults = measure(options.device)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
