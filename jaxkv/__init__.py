"""jaxkv: KV-cache compression for long-context inference in JAX."""
