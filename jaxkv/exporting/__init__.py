"""Programs, weights and a manifest that run where jaxkv is not: `export`."""

from jaxkv.exporting.writing import PLATFORMS, export

__all__ = ["PLATFORMS", "export"]
