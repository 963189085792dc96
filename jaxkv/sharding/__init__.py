"""Meshes: logical axes, placement of arrays, `sharded_jit` for compiled functions, collectives, recorded calls."""
