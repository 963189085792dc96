"""GPU kernels of jaxkv, in Pallas: attention over ragged segments, top-k gather, prefill with scores.

Nothing here knows of caches, policies or models: functions of arrays, which `jaxkv.attention` calls.
"""

from .decode import attend
from .gather import compact, gather_rows
from .norm import add_norm
from .prefill import column_sums, flash
from .replace import replace_rows

__all__ = ["add_norm", "attend", "column_sums", "compact", "flash", "gather_rows", "replace_rows"]
