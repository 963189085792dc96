"""Meshes: logical axes of axes, placement of arrays, `program` for compiled functions, collectives, recorded calls."""
