"""TPU kernels in Pallas: decode attention that appends in place, and prefill by JAX's splash attention."""
