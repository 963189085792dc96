"""GPU kernels in Pallas: attention over ragged segments, causal prefill with scores, row gathers, eviction.

They take and return arrays and know no caches, policies or models; `jaxkv.attention` calls them.
"""

from .chunks import Chunks, deal
from .codes import Coded, Nibbles
from .decode import attend, decode_token
from .gather import compact
from .linear import multiply_codes
from .norm import add_norm
from .prefill import column_sums, flash
from .replace import evict_rows, replace_rows
from .rows import Picks
from .tiles import programs
from .window import window_sums

__all__ = [
    "Chunks",
    "Coded",
    "Nibbles",
    "Picks",
    "add_norm",
    "attend",
    "column_sums",
    "compact",
    "deal",
    "decode_token",
    "evict_rows",
    "flash",
    "multiply_codes",
    "programs",
    "replace_rows",
    "window_sums",
]
