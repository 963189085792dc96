"""The kernels, imported by those who use them."""

from types import ModuleType

from jaxkv.attention.choice import Implementation


def kernels_of(implementation: Implementation) -> tuple[ModuleType, bool]:
    """The GPU kernels.

    Args:
        implementation: one that uses them.

    Returns:
        Their package, and whether they are interpreted.
    """
    # Pallas takes half a second and tens of megabytes to import, which nobody pays who does not use it.
    import jaxkv.pallas_kernels as pallas_kernels

    return pallas_kernels, implementation is Implementation.INTERPRETED
