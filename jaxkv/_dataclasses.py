"""The one kind of dataclass of configurations and state: frozen, with keyword-only arguments."""

import dataclasses
from typing import TypeVar, dataclass_transform

C = TypeVar("C")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def frozen_dataclass(cls: type[C]) -> type[C]:
    """Make a class a frozen dataclass whose arguments are given by name, as `dataclasses.dataclass` does."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)
