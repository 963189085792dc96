"""Rejections of plans for GPUs, and of exports."""

from unittest import mock

import tiny
from meshes import mesh_of
from policy_table import REPEATED
from refusing import door
from test_export import MODEL, NEW
from test_export_place import Last

import jaxkv
from jaxkv.exporting import writing
from jaxkv.planning.planner import plan

SMALL = tiny.shape(layers=1, kv_heads=1, group=1, dim=8)
ONE = {"filter_layers": (0,), "adjacent": 0, "budget": 24}


def planned(options):
    options = {"model": "llama-3.1-70b", "context": 1024} | options
    return plan(options.pop("model"), **options)


def exported(options):
    return jaxkv.export(tiny.tiny(MODEL), "out", **({"lengths": 64, "new": NEW} | options))


def placed(directory):
    """Before minutes have gone into programs."""
    with mock.patch.object(
        writing, "_write_programs", side_effect=AssertionError("programs are made already")
    ):
        return jaxkv.export(tiny.tiny(SMALL), directory, lengths=16, question=0, new=4)


ROWS = [
    *door(
        "plan",
        planned,
        ({"gpus": "h10x8"}, "gpus="),
        ({"gpus": "h100x3"}, "mesh.model="),
        ({"model": "lama-3.1-70b"}, "model=.*llama-3.1-70b"),
        ({"model": 3}, TypeError, "model="),
        ({"mesh": "3x3"}, "mesh="),
        ({"context": 200000}, "context="),
        ({"batch": 0}, "batch="),
        ({"questions": 2.5}, "questions="),
        ({"dtype": "int8"}, "dtype="),
        ({"policy": "snapvk"}, "policy="),
        ({"gpus": "cpu", "compile": True}, "compile="),
    ),
    *door(
        "export",
        exported,
        ({"policy": jaxkv.OmniKV(**ONE, offload=True)}, "OmniKV"),
        ({"policy": jaxkv.OmniKV(**ONE, prefill_ratio=2)}, "OmniKV.*chunk"),
        ({"policy": jaxkv.KVGrad(**REPEATED)}, "KVGrad.*twice"),
        ({"platforms": "gpu"}, "platforms="),
        ({"lengths": 500}, "lengths=|made for 512"),
        ({"implementation": "cudnn"}, "implementation="),
        ({"sampling": (jaxkv.Sampling(top_p=0.5), jaxkv.Sampling(top_p=0.9))}, "sampling="),
        ({"batch": 3, "mesh": mesh_of(2, 1)}, "batch="),
        ({"mesh": mesh_of(1, 3)}, "mesh.model=3"),
        ({"sampling": type("Greedy", (Last,), {})()}, "sampling="),
    ),
    *door(
        "a place for an export",
        placed,
        ("out\0", "directory="),
        ("out.partial", "directory="),
        (None, TypeError, "directory="),
    ),
]
