"""GPU kernels of jaxkv, in Pallas: attention over ragged segments, top-k gather, prefill with scores.

Nothing here knows of caches, policies or models: functions of arrays, which `jaxkv.attention` calls.
"""

from .chunks import Chunks, deal
from .decode import attend, decode_token
from .gather import compact, gather_rows
from .prefill import column_sums, flash
from .tuning import programs

__all__ = ["Chunks", "attend", "column_sums", "compact", "deal", "decode_token", "flash", "gather_rows", "programs"]
