"""The Flax decoder for all model families; a family is a set of switches in `ModelConfig`."""

from jaxkv.models.blocks import DecoderBlock
from jaxkv.models.decoder import Decoder

__all__ = ["DecoderBlock", "Decoder"]
