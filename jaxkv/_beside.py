"""Where `checkpoints` and `pallas_kernels` lie: inside this package in a wheel, beside it in a checkout.

Both are imported as `jaxkv.checkpoints` and `jaxkv.pallas_kernels` only. So nobody's own folder or module of such a
name is taken for ours, wherever it lies on the path, and ours takes the name from nobody.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).parent

if not (_HERE / "checkpoints").is_dir():
    sys.modules[__package__].__path__.append(str(_HERE.parent))
