"""The engine: plans, prefill, compression, decode steps, the token loop, sessions and slots."""
