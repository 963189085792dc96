"""Views of one layer's entries in a decode step, by how new tokens are appended and attend to these.

A view is created while a step is traced, right before the layer's block, and discarded after it: no program accepts or
returns one. Only `binding.bound` selects a kind of view, and only `blocks.run_block` handles the rest of a block.
"""
