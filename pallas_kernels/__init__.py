"""GPU kernels in Pallas: attention over ragged segments, causal prefill with scores, gathers, eviction.

They are functions of arrays, without caches, policies or models; `jaxkv.attention` calls them.
"""

from pallas_kernels.chunks import Chunks, work_table
from pallas_kernels.codes import Coded, Nibbles
from pallas_kernels.decode import Scores, attend, decode_token
from pallas_kernels.gather import compact
from pallas_kernels.linear import multiply_codes
from pallas_kernels.norm import add_norm
from pallas_kernels.prefill import column_sums, flash
from pallas_kernels.replace import evict_rows, replace_rows
from pallas_kernels.rows import Picks, Token
from pallas_kernels.tiles import programs
from pallas_kernels.window import window_sums

__all__ = [
    "Chunks",
    "Coded",
    "Nibbles",
    "Picks",
    "Scores",
    "Token",
    "add_norm",
    "attend",
    "column_sums",
    "compact",
    "work_table",
    "decode_token",
    "evict_rows",
    "flash",
    "multiply_codes",
    "programs",
    "replace_rows",
    "window_sums",
]
