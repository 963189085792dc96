# mypy: warn-unused-ignores
"""What `generate` is to a type checker: mypy reads this file, nothing runs it."""

from typing import assert_type

import jaxkv


def answers(model: jaxkv.LanguageModel, either: bool) -> None:
    """What is returned follows from `stream`, and an option of another name or kind is a mistake."""
    assert_type(jaxkv.generate(model, "Hello"), jaxkv.Generation)
    assert_type(jaxkv.generate(model, ["Hello", "there"], stream=False, max_new_tokens=4), jaxkv.Generation)
    assert_type(jaxkv.generate(model, "Hello", stream=True, policy=jaxkv.SnapKV(budget=64)), jaxkv.Stream)
    assert_type(jaxkv.generate(model, "Hello", stream=either), jaxkv.Generation | jaxkv.Stream)
    jaxkv.generate(model, "Hello", max_tokens=4)  # type: ignore[call-overload]
    jaxkv.generate(model, "Hello", stop=4)  # type: ignore[call-overload]
