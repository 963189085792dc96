"""GGUF files whose lengths and kinds are wrong: rejected by name, in little time and memory."""

import os
import struct
import time

import gguf
import numpy as np
import pytest
from test_checkpoints import write_gguf

from jaxkv.checkpoints import gguf_reader, open_checkpoint
from jaxkv.models.config import ModelConfig

U8, U32, STRING, ARRAY = 0, 4, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value


def file(path, *, tensors=0, keys=None, body=b""):
    keys = body.count(b"\0key") if keys is None else keys
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body + bytes(64))
    return path


def pair(kind, value):
    return text(b"\0key") + struct.pack("<I", kind) + value


def tensor(name, *axes, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)


HUGE = struct.pack("<Q", 2**60)
CLAIMS = {
    "keys": (dict(keys=2**40), "keys, at most"),
    "tensors": (dict(tensors=2**40), "tensors, at most"),
    "text": (dict(body=pair(STRING, HUGE)), "beyond the metadata"),
    "list of numbers": (
        dict(body=pair(ARRAY, struct.pack("<I", U8) + HUGE)),
        "items in '.x00key', at most",
    ),
    "list past the end": (
        dict(body=pair(ARRAY, struct.pack("<IQ", U32, 10**6))),
        "4,000,000 bytes from byte",
    ),
    "list of lists": (
        dict(body=pair(ARRAY, struct.pack("<IQ", ARRAY, 1) * 99)),
        "items of unknown kind 9",
    ),
    "kind": (dict(body=pair(77, b"")), "unknown kind 77"),
    "twice": (dict(body=pair(U8, b"\1") * 2), "'.x00key' twice"),
    "axes": (dict(tensors=1, body=text(b"a") + struct.pack("<I", 2**31)), "with 2147483648 axes"),
    "shape": (dict(tensors=1, body=tensor(b"a", 2**40, 2**40)), "'a' ends at byte"),
    "type": (dict(tensors=1, body=tensor(b"a", 2, kind=999)), "'a' of unknown type 999"),
    "blocks": (dict(tensors=1, body=tensor(b"a", 33, kind=8)), "blocks of 32"),
    "overlap": (dict(tensors=2, body=tensor(b"a", 4) + tensor(b"b", 4, offset=8)), "'b' overlaps"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_that_the_file_does_not_hold(tmp_path, claim):
    parts, message = CLAIMS[claim]
    path = file(tmp_path / "m.gguf", **parts)
    started = time.perf_counter()
    with pytest.raises(
        ValueError, match=rf"m\.gguf: truncated or corrupt GGUF of \d+ bytes .*{message}"
    ):
        open_checkpoint(path)
    assert time.perf_counter() - started < 5


def test_a_large_file_of_nothing(tmp_path):
    path = file(tmp_path / "m.gguf", body=pair(ARRAY, struct.pack("<IQ", U8, 2**33)))
    with path.open("r+b") as handle:
        handle.truncate(2**34)  # sparse: it takes no room
    with pytest.raises(ValueError, match="8,589,934,592 items"):
        open_checkpoint(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"m\.gguf: neither a folder nor a regular file"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_file_that_is_cut_after_it_was_opened(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    os.truncate(tmp_path / "m.gguf", os.path.getsize(tmp_path / "m.gguf") - 1000)
    with pytest.raises(
        ValueError, match=r"m\.gguf: the file ends within '.*', and did not when it was opened"
    ):
        for tensor in checkpoint.stored.values():
            tensor.read(())


def test_it_reads_what_the_formats_library_reads(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        edit=lambda writer: writer.add_array("mixed.texts", ["é", "", "x" * 300]),
    )
    metadata, tensors = gguf_reader.read_gguf_header(path)
    theirs = gguf.GGUFReader(path)
    own = {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert metadata == own and list(tensors) == [each.name for each in theirs.tensors]
    for each in theirs.tensors:
        np.testing.assert_array_equal(tensors[each.name].stored_array, each.data)
        assert tensors[each.name].kind is each.tensor_type


@pytest.mark.parametrize(
    "edit, name",
    [
        (lambda w: w.add_string("llama.attention.key_length", "8"), "key_length"),
        (lambda w: w.add_array("tokenizer.ggml.tokens", [1, 2]), "tokens"),
        (lambda w: w.add_string("llama.rope.scaling.type", "linear"), "rope.scaling.factor"),
    ],
)
def test_metadata_of_another_kind(tmp_path, edit, name):
    with pytest.raises(ValueError, match=f"{name}="):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", edit=edit))


def yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


# llama.cpp's defaults: https://github.com/ggml-org/llama.cpp, `load_hparams` and `llama_vocab`.
@pytest.mark.parametrize(
    "edit, scaling",
    [
        (lambda w: None, None),
        (lambda w: w.add_rope_scaling_factor(2.0), {"rope_type": "linear", "factor": 2.0}),
        (
            lambda w: w.add_float32("llama.rope.scale_linear", 2.0),
            {"rope_type": "linear", "factor": 2.0},
        ),
        (lambda w: w.add_rope_scaling_factor(0.0), None),
        # The context that the file names is the one it was trained with.
        (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}),
    ],
)
def test_scalings_that_leave_keys_out(tmp_path, edit, scaling):
    assert (
        open_checkpoint(write_gguf(tmp_path / "m.gguf", edit=edit)).config["rope_scaling"]
        == scaling
    )


@pytest.mark.parametrize(
    "model, keys, bos, eos",
    [
        (None, {}, None, ()),
        ("llama", {}, 1, (2,)),
        ("llama", {"bos": 5}, 5, (2,)),
        ("llama", {"eos": 5, "eot": 6}, 1, (5, 6)),
        ("gpt2", {"eos": 5, "eot": 5}, None, (5,)),
    ],
)
def test_ids_that_are_left_out(tmp_path, model, keys, bos, eos):
    """They are llama.cpp's defaults of the vocabulary, not those of transformers' class of the family."""

    def edit(writer):
        if model is not None:
            writer.add_tokenizer_model(model)
            writer.add_token_list([f"<{index}>" for index in range(8)])
        for kind, index in keys.items():
            writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", index)

    for arch in ("llama", "qwen2"):
        checkpoint = open_checkpoint(write_gguf(tmp_path / f"{arch}.gguf", arch=arch, edit=edit))
        config = ModelConfig.from_hf(checkpoint.config)
        assert (config.bos, config.eos) == (bos, eos)
        assert model is None or checkpoint.tokenizer_spec.bos == bos


def test_windows_of_all_layers(tmp_path):
    """Of Qwen's too, whose class would give none to a model's first 28 layers."""
    for arch in ("qwen2", "qwen3"):
        path = write_gguf(
            tmp_path / f"{arch}.gguf", arch=arch, edit=lambda writer: writer.add_sliding_window(64)
        )
        read = ModelConfig.from_hf(open_checkpoint(path).config)
        assert read.sliding_windows == (64,) * read.layers
    path = write_gguf(tmp_path / "llama.gguf", edit=lambda writer: writer.add_sliding_window(64))
    with pytest.raises(ValueError, match="sliding_window=64: no llama has sliding windows"):
        ModelConfig.from_hf(open_checkpoint(path).config)
