"""Where arrays lie on a mesh, by the letters of their axes; the one door to programs; what travels between devices."""
