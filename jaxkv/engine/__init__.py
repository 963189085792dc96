"""The engine: plans, prefill, compression, one step of a layer and what drives it, sessions."""
