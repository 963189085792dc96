"""What is refused on a mesh, by name."""

from jaxkv._errors import require
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
