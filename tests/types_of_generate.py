# mypy: warn-unused-ignores
"""What `generate` and `plan` are to a type checker: mypy reads this file, nothing runs it."""

from typing import assert_type

import jaxkv
from jaxkv.planning.plans import Plan


def answers(model: jaxkv.LanguageModel, either: bool) -> None:
    """What is returned follows from `stream`, and an option of another name or kind is a mistake."""
    assert_type(jaxkv.generate(model, "Hello"), jaxkv.Generation)
    assert_type(
        jaxkv.generate(model, ["Hello", "there"], stream=False, max_new_tokens=4), jaxkv.Generation
    )
    assert_type(
        jaxkv.generate(model, "Hello", stream=True, policy=jaxkv.SnapKV(budget=64)),
        jaxkv.engine.generation_results.Stream,
    )
    assert_type(
        jaxkv.generate(model, "Hello", stream=either),
        jaxkv.Generation | jaxkv.engine.generation_results.Stream,
    )
    out = jaxkv.generate(model, ["Hello", "there"])
    assert_type(out[0], jaxkv.engine.generation_results.Completion)
    assert_type([each.text for each in out], list[str | None])
    jaxkv.generate(model, "Hello", max_tokens=4)  # type: ignore[call-overload]
    jaxkv.generate(model, "Hello", stop=4)  # type: ignore[call-overload]


def plans() -> None:
    """Of GPUs it is a plan of one of them, of `cpu` that of a process."""
    assert_type(jaxkv.plan("llama-3.1-8b", gpus="h100x8", context=1024, policy="snapkv"), Plan)
    assert_type(jaxkv.plan("llama-3.1-8b", context=1024), Plan)
    assert_type(jaxkv.plan("smollm2-135m", gpus="cpu", context=1024), Plan)
    jaxkv.plan("llama-3.1-8b", context=1024, gpu="h100")  # type: ignore[call-arg]
