"""`require`: raises a ValueError that names the field, the value and the remedy."""

from jaxkv.checkpoints._errors import require

__all__ = ["require"]
