"""Hashes of the compiled programs of a policy, to hold a change that should change none against the tree before it.

python -m tests.programs OUT.json [NAME ...]    programs of these rows of the policy table, or of all, as JSON
python -m tests.programs A.json B.json          what differs between two such files; ends with 1 if anything does

Hashed are the text that JAX hands to XLA and XLA's optimised text, both without names and source lines: programs are
equal if one of the two is. Run it from the root of either tree.
"""

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Program = tuple[str, str, str]  # name, hash before XLA, hash of what XLA made
LENGTHS, QUESTIONS, BUDGET, NEW = (61, 37), (5, 11), 24, 6


def recording(programs: list[Program]) -> None:
    """From now on every program that JAX compiles leaves its name and hash in the list."""
    from jax._src import compiler

    original = compiler.backend_compile_and_load

    def compiled(backend: Any, computation: Any, *args: Any, **options: Any) -> Any:
        given = computation.operation.get_asm(enable_debug_info=False)
        made = original(backend, computation, *args, **options)
        for module in made.hlo_modules():
            programs.append((module.name, short(given), hashed(module.to_string())))
        return made

    compiler.backend_compile_and_load = compiled


def short(text: str) -> str:
    """Short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hashed(text: str) -> str:
    """Short hash of an optimised program whose instructions are numbered in the order in which they come."""
    # The header ends with tables of source lines, which an empty line separates from the first computation.
    _, _, text = text.rpartition("\nStackFrames\n")
    _, _, text = text.partition("\n\n")
    text = re.sub(r", metadata=\{[^}]*\}|, backend_config=\{.*?\}$", "", text, flags=re.M)
    numbers: dict[str, str] = {}
    number = lambda name: numbers.setdefault(name.group(), f"%{len(numbers)}")  # noqa: E731
    return short(re.sub(r"%[\w.\-]+", number, text))


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and calls: prefill, answer and a question on top, over plain layers and over some with windows."""
    import policy_table
    import tiny

    import jaxkv
    from jaxkv.models.config import LayerSpec

    plain = tiny.tiny(tiny.TWO_LAYERS)
    kinds = (LayerSpec(), LayerSpec(sliding_window=16))
    windowed = tiny.tiny(dataclasses.replace(tiny.TWO_LAYERS, layers=3, kinds=kinds))
    options = {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}
    for row in policy_table.TABLE:
        for kind, model in (("plain", plain), ("windows", windowed)):

            def call(model: Any = model, row: Any = row) -> None:
                prompts = tiny.prompts(5, LENGTHS)
                made = jaxkv.generate(model, prompts, policy=row.policy(BUDGET), **options)
                jaxkv.generate(model, tiny.prompts(6, QUESTIONS), cache=made.cache, **options)

            yield f"{row.name}/{kind}", call


def record(out: Path, names: list[str]) -> None:
    """Runs the cases and writes their programs' hashes, sorted by name."""
    import jax

    programs: list[Program] = []
    recording(programs)
    found = {}
    for name, call in cases():
        if names and name.partition("/")[0] not in names:
            continue
        programs.clear()
        jax.clear_caches()
        try:
            call()
        except ValueError as error:
            programs.append(("refused", type(error).__name__, ""))
        found[name] = sorted(programs)
        print(name, len(programs), flush=True)
    out.write_text(json.dumps(found, indent=1), "utf-8")


def compare(first: Path, second: Path) -> int:
    """Prints what differs, and returns the number of cases that do."""
    mine, theirs = (json.loads(each.read_text("utf-8")) for each in (first, second))
    differ = [name for name in sorted(mine | theirs) if left(mine, theirs, name) != ([], [])]
    for name in differ:
        before, now = left(mine, theirs, name)
        print(name, "only before:", before, "only now:", now)
    print(f"{len(mine | theirs) - len(differ)} of {len(mine | theirs)} cases have equal programs")
    return len(differ)


def left(mine: dict, theirs: dict, name: str) -> tuple[list[Program], list[Program]]:
    """Programs of a case on either side that have no equal on the other."""
    before, now = [*mine.get(name, ())], [*theirs.get(name, ())]
    for which in (1, 2):
        for program in [*before]:
            equal = next((each for each in now if each[which] == program[which]), None)
            if equal is not None:
                before.remove(program)
                now.remove(equal)
    return before, now


def main() -> None:
    """Records or compares."""
    given = sys.argv[1:]
    if len(given) == 2 and all(Path(each).suffix == ".json" for each in given):
        sys.exit(min(compare(*map(Path, given)), 1))
    sys.path.append(str(Path(__file__).parent))
    record(Path(given[0]), given[1:])


if __name__ == "__main__":
    main()
