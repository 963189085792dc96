"""Refusals of plans for GPUs, and of exports."""

import dataclasses
from unittest import mock

import tiny
from meshes import mesh_of
from refusing import calls, door
from test_export import MODEL, NEW
from test_export_place import Last
from test_planning import setting

import jaxkv
from jaxkv.exporting import writing
from jaxkv.planning.gpus import gpus
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
        writing, "_programs", side_effect=AssertionError("programs are made already")
    ):
        return jaxkv.export(tiny.tiny(SMALL), directory, lengths=16, question=0, new=4)


ROWS = [
    *door(
        "plan",
        planned,
        ({"gpus": "h10x8"}, "no such GPU or TPU; .* did you mean h100"),
        ({"gpus": "h100,a100-80gb"}, "gpus=.*a plan is of one kind of GPU"),
        ({"gpus": "h100x0"}, "give 1 or more of them"),
        ({"gpus": "h100x1000000"}, "fewer than a million"),
        ({"model": "lama-3.1-70b"}, "did you mean llama-3.1-70b"),
        ({"model": "zzz"}, "known models: codellama-34b, "),
        ({"model": ""}, "model='': no such model"),
        ({"gpus": "h100x3"}, "mesh.model=3: it does not divide"),
        ({"mesh": "3x3"}, "give groups and GPUs of each, 1x8"),
        ({"mesh": "1x" + "9" * 5000}, "mesh=.*999.*: give groups and GPUs of each"),
        ({"context": 200000}, "context=200000: llama-3.1-70b was made for 131072"),
        (
            {"context": "128 tokens"},
            "context='128 tokens': give a number of tokens, such as 131072 or 128K",
        ),
        ({"gpus": "0xh100"}, "give 1 or more of them"),
        ({"price": 0}, "price=0: give the price of a GPU for an hour"),
        ({"price": "2.5"}, "price='2.5': give the price of a GPU for an hour"),
        ({"quality": "/nowhere"}, "quality='/nowhere': no evaluation lies there"),
        ({"quality": 3}, TypeError, "quality=3: give the folder of an evaluation"),
        ({"batch": 0}, "batch=0: give 1 prompt"),
        ({"questions": 0}, "questions=0: give how many a prompt answers, 1 or more"),
        ({"questions": 2.5}, "questions=2.5: give how many a prompt answers"),
        ({"dtype": "int8"}, "dtype='int8': give one of bfloat16"),
        ({"policy": "snapvk"}, "no such policy"),
        ({"model": 3, "gpus": "h100"}, TypeError, "give a "),
        ({"model": "llama-3.1-8b", "gpus": 8}, TypeError, "give a "),
        ({"model": "llama-3.1-8b", "mesh": 8}, "mesh=8: give groups and GPUs"),
        ({"model": "llama-3.1-8b", "dtype": 5}, "dtype=5: give one of bfloat16"),
    ),
    *door(
        "a plan's setting",
        lambda change: dataclasses.replace(setting(), **change),
        ({"gpu": "h100"}, "gpu='h100': give a GPU"),
        ({"policy": "snapkv"}, "policy='snapkv': give a policy"),
        ({"config": {}}, "config={}: give a ModelConfig"),
    ),
    *calls(
        "a GPU",
        (
            lambda: dataclasses.replace(gpus()["h100"], memory=0),
            "memory=0: give a positive whole number",
        ),
    ),
    *door(
        "export",
        exported,
        ({"policy": jaxkv.OmniKV(**ONE, offload=True)}, "OmniKV brings rows from"),
        (
            {"policy": jaxkv.BrutalOffload(resident_layers=1)},
            "BrutalOffload brings rows from host memory",
        ),
        ({"policy": jaxkv.OmniKV(**ONE, prefill_ratio=2)}, "reads prompts chunk by chunk"),
        ({"platforms": "gpu"}, r"platforms=\['gpu'\]: give of cpu, cuda, rocm, tpu"),
        ({"lengths": 500}, "the model was made for 512"),
        ({"lengths": 0}, "lengths=0: give a number"),
        ({"implementation": "cudnn"}, "give 'xla', or 'pallas'"),
        ({"sampling": (jaxkv.Sampling(top_p=0.5), jaxkv.Sampling(top_p=0.9))}, "sampling="),
        ({"batch": 3, "mesh": mesh_of(2, 1)}, r"batch=\[3\]: the mesh has 2 groups"),
        ({"mesh": mesh_of(1, 3)}, "mesh.model=3"),
        ({"sampling": type("Greedy", (Last,), {})()}, "sampling="),
    ),
    *door(
        "a place for an export",
        placed,
        ("out\0", "directory='out.x00': no name holds null characters"),
        ("~nobodyatall/out", "directory='~nobodyatall/out': there is no such user's home"),
        ("out.partial", "directory=out.partial: .partial is for unfinished ones"),
        *(
            (given, TypeError, "directory=.*: give the path of the folder to make")
            for given in (b"out", 3, None, ["out"])
        ),
    ),
]
