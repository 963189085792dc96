"""What a process runs on: memory, threads, other processes, compiled programs."""
