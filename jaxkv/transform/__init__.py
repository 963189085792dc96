"""The transform for models outside jaxkv: `compress` makes a state of a layer's arrays, to which `step` adds tokens."""
