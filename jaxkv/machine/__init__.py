"""Memory, threads, other processes and compiled programs of the process."""
