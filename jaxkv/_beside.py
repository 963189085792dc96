"""Locates `checkpoints` and `pallas_kernels`: inside this package in a wheel, beside it in a checkout.

Both are imported as `jaxkv.checkpoints` and `jaxkv.pallas_kernels` only, so that they neither are confused with nor
hide a user's own folder or module of such a name.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).parent

if not (_HERE / "checkpoints").is_dir():
    sys.modules[__package__].__path__.append(str(_HERE.parent))
