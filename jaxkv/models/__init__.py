"""The Flax decoder for all model families; a family is a set of switches in `ModelConfig`."""

from jaxkv.models.decoder import Decoder
from jaxkv.models.decoder_blocks import DecoderBlock

__all__ = ["DecoderBlock", "Decoder"]
