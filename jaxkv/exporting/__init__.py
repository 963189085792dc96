"""`export` writes programs, weights and a manifest that run without jaxkv."""

from jaxkv.exporting.writing import PLATFORMS, export

__all__ = ["PLATFORMS", "export"]
