"""What is said of programs that no cache on disk keeps."""

import logging

import jax
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache

import jaxkv
from jaxkv.machine import compilation

_CONFIG = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def untold(monkeypatch):
    """A process that has not said so yet, without a cache on disk."""
    monkeypatch.setattr(compilation, "_told", False)
    kept = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", kept)


def test_long_compiling_is_told_once(untold, caplog, monkeypatch):
    assert (
        jaxkv.machine.compilation.enable_compilation_cache is compilation.enable_compilation_cache
    )
    with caplog.at_level(logging.WARNING, "jaxkv"):
        compilation.log_slow_compilation(10.0)
        assert not caplog.records
        # Every call tells what it took.
        monkeypatch.setattr(compilation, "_SLOW", -1.0)
        for _ in range(2):
            jaxkv.generate(tiny.tiny(tiny.TWO_LAYERS), [1, 2, 3], max_new_tokens=1)
    (record,) = caplog.records
    assert "enable_compilation_cache() of jaxkv.machine.compilation" in record.getMessage()


def test_nothing_is_told_where_programs_are_kept(untold, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "jaxkv"):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compilation.log_slow_compilation(60.0)
    assert not caplog.records


def test_the_folder_of_programs_stays_where_it_was(untold, as_users_call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {name: getattr(jax.config, name) for name in _CONFIG}
    try:
        assert (
            jaxkv.machine.compilation.enable_compilation_cache("programs") == tmp_path / "programs"
        )
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    (tmp_path / "file").touch()
    for path, error, message in (
        ("", ValueError, "path='': empty: use a folder"),
        ("file", ValueError, "file': it is a file: use a folder"),
        (b"programs", TypeError, "path=b'programs': not a path: use a folder"),
    ):
        with pytest.raises(error, match=message):
            jaxkv.machine.compilation.enable_compilation_cache(path)
