"""`needing`: context manager around imports that need one of jaxkv's extras."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Context manager that turns a missing package into an ImportError that names the extra to install.

    `what` begins the message: "serving needs". A missing module of jaxkv's own is raised as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jaxkv"):
            raise
        raise ImportError(f"{what} {error.name}: pip install 'jaxkv[{extra}]'") from None
