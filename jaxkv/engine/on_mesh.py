"""What is refused on a mesh, by name."""

from jaxkv._errors import require
from jaxkv.axes import Axes
from jaxkv.policies.policy import Method
from jaxkv.policies.reading import FilteredReads


def require_known(policy: Method) -> None:
    """Refuses what would not be right on a mesh.

    Args:
        policy: the compression.

    Raises:
        ValueError: naming what it is.
    """
    read = policy.parts().read
    at_hand = read is None or (isinstance(read, FilteredReads) and not read.offload)
    remedy = "rows in host memory are not on a mesh yet: give offload=False, or a model without a mesh"
    require(at_hand, "policy.read", read, remedy)


def require_even(batch: int, axes: Axes) -> None:
    """Refuses prompts that do not spread evenly.

    Args:
        batch: how many there are.
        axes: of the mesh.

    Raises:
        ValueError: naming how many would.
    """
    groups = axes.size("B")
    require(batch % groups == 0, "prompts", batch, f"not on a mesh yet: give a multiple of mesh.data={groups}")
