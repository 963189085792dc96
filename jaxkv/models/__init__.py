"""The Flax decoder for all model families; a family is a set of switches in `ModelConfig`."""

from jaxkv.models.decoder import Block, Decoder

__all__ = ["Block", "Decoder"]
