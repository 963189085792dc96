"""What is said of programs that no cache on disk keeps."""

import logging

import jax
import pytest
import tiny

import jaxkv
from jaxkv import compilation


@pytest.fixture
def untold(monkeypatch):
    """A process that has not said so yet, without a cache on disk."""
    monkeypatch.setattr(compilation, "_told", False)
    kept = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", kept)


def test_long_compiling_is_told_once(untold, caplog, monkeypatch):
    assert jaxkv.enable_compilation_cache is compilation.enable_compilation_cache
    with caplog.at_level(logging.WARNING, "jaxkv"):
        compilation.tell_if_slow(10.0)
        assert not caplog.records
        # Every call tells what it took.
        monkeypatch.setattr(compilation, "_SLOW", -1.0)
        for _ in range(2):
            jaxkv.generate(tiny.tiny(tiny.TWO_LAYERS), [1, 2, 3], max_new_tokens=1)
    (record,) = caplog.records
    assert "jaxkv.enable_compilation_cache() before the first call" in record.getMessage()


def test_nothing_is_told_where_programs_are_kept(untold, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "jaxkv"):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compilation.tell_if_slow(60.0)
    assert not caplog.records
