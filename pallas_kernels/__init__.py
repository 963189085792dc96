"""GPU kernels of jaxkv, in Pallas: attention over ragged segments, top-k gather, prefill with scores.

Nothing here knows of caches, policies or models: functions of arrays, which `jaxkv.attention` calls.
"""

from .decode import attend
from .gather import compact, gather_rows
from .prefill import column_sums, flash
from .window import window_sums

__all__ = ["attend", "column_sums", "compact", "flash", "gather_rows", "window_sums"]
