"""`require` raises, and `refusal` makes, a ValueError that names the field, the value and the remedy."""

from jaxkv.checkpoints._errors import refusal, require

__all__ = ["refusal", "require"]
