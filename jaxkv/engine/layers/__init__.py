"""Views of one layer's entries in a decode step, by how new tokens join and read them.

A view is made while a step is traced, right before the layer's block, and taken apart behind it: no program takes or
returns one. `binding.bound` is the only place that chooses a kind, `blocks.run_block` the only one for what is
independent of reading.
"""
