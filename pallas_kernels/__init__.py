"""GPU kernels in Pallas: attention over ragged segments, causal prefill with scores, gathers, eviction.

They are functions of arrays, without caches, policies or models; `jaxkv.attention` calls them.
"""

from pallas_kernels.chunks import WorkTable, build_work_table
from pallas_kernels.codes import Int4Pool, Int8Pool
from pallas_kernels.decode import EntryScores, append_and_attend, attend
from pallas_kernels.gather import gather_kept_entries
from pallas_kernels.linear import multiply_codes
from pallas_kernels.linear_dot import multiply_blocks_by_tensor_cores
from pallas_kernels.norm import add_norm
from pallas_kernels.prefill import flash, sum_attention_per_key
from pallas_kernels.replace import evict_lowest_entries, overwrite_evicted_rows
from pallas_kernels.rows import NewTokenInputs, SelectedEntries
from pallas_kernels.tiles import count_concurrent_programs
from pallas_kernels.window import sum_window_attention

__all__ = [
    "WorkTable",
    "Int8Pool",
    "Int4Pool",
    "SelectedEntries",
    "EntryScores",
    "NewTokenInputs",
    "add_norm",
    "attend",
    "sum_attention_per_key",
    "gather_kept_entries",
    "build_work_table",
    "append_and_attend",
    "evict_lowest_entries",
    "flash",
    "multiply_codes",
    "multiply_blocks_by_tensor_cores",
    "count_concurrent_programs",
    "overwrite_evicted_rows",
    "sum_window_attention",
]
