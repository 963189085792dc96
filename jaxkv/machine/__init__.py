"""Memory, threads, other processes and compiled programs of this process."""
