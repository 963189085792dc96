"""Meshes: letters of axes, placement of arrays, the door to programs, collectives, recorded calls."""
