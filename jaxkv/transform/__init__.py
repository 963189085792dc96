"""Compression for models outside jaxkv: `compress` makes a state of a layer's arrays; `step` adds tokens to it."""
