"""What is compiled while a test runs, and by which thread."""

import threading

import jax


class CompiledPrograms:
    """Context manager that lists (program, thread) of all that JAX compiles in it, in order, beginning with nothing."""

    def __init__(self):
        self.found = []

    def __call__(self, event, duration_secs, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            name = (fun_name or "").removeprefix("jit(").removesuffix(")")
            self.found.append((name, threading.current_thread().name))

    def __enter__(self):
        jax.clear_caches()
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self)

    def threads(self, name):
        """The threads that compiled programs of this name, one for each."""
        return [thread for program, thread in self.found if program == name]
