"""Flax decoders. One decoder, families as switches of `ModelConfig`."""

from jaxkv.models.decoder import Block, Decoder

__all__ = ["Block", "Decoder"]
