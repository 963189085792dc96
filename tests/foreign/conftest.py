"""The other library's code mixes dtypes as JAX does by default."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "standard")
