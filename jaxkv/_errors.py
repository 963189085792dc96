"""One way to refuse: name the field, the value and the remedy."""

from jaxkv.checkpoints._errors import require

__all__ = ["require"]
