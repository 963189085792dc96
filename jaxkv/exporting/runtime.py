"""Generates from a folder that `jaxkv export` has written, with jax and numpy alone: copied there, it needs no jaxkv.

`Model("DIR").generate([1, 2, 3]).tokens` in Python; `python DIR/runtime.py "Hello" 64` on the command line.
"""

import collections
import hashlib
import importlib.util
import json
import pathlib

import jax
import numpy as np
from jax import export

DTYPES = {"F32": np.float32, "BF16": jax.numpy.bfloat16, "F16": np.float16, "I32": np.int32}
# Rows of `count` sequences by name, of programs `at` (slots, batch); `room` tokens fit. A value: nothing changes it.
Cache = collections.namedtuple("Cache", "arrays at count room turn")
Answer = collections.namedtuple("Answer", "tokens text cache")
Program = collections.namedtuple("Program", "run inputs outputs there")


def need(fine, message):
    if not fine:
        raise ValueError(message)


def found(path, of, check=True):
    sound = path.is_file() and path.stat().st_size == of["bytes"]
    sound = sound and (not check or hashlib.sha256(path.read_bytes()).hexdigest() == of["sha256"])
    need(sound, f"{path}: {'damaged' if path.is_file() else 'missing'}: copy the whole folder again")
    return path


def tensors(folder, files, check=True):
    for name, of in files.items():
        raw = np.memmap(found(folder / name, of, check), np.uint8, "r")
        data = raw[8 + (size := int.from_bytes(raw[:8].tobytes(), "little")) :]
        for each, at in json.loads(raw[8 : 8 + size].tobytes()).items():
            yield each, data[slice(*at["data_offsets"])].view(DTYPES[at["dtype"]]).reshape(at["shape"])


def program(folder, said, mesh):
    path, sides = found(folder / "programs" / said["file"], said), []
    try:
        read = export.deserialize(bytearray(path.read_bytes()))
    except Exception as error:
        raise ValueError(f"{path}: jax {jax.__version__} cannot read it ({error}): export anew") from error
    for side, avals in (("inputs", read.in_avals), ("outputs", read.out_avals)):
        told = {e["name"]: (e["dtype"], *(said["batch"] if n == "B" else n for n in e["shape"])) for e in said[side]}
        have = [(aval.dtype.name, *aval.shape) for aval in avals]
        odd = next((f"{name} {a}, here {b}" for (name, a), b in zip(told.items(), have, strict=False) if a != b), side)
        need(list(told.values()) == have, f"{path}: not as the manifest says, {odd}: export anew")
        sides.append(told)
    run = jax.jit(read.call, donate_argnums=[at for at, each in enumerate(said["inputs"]) if each["donated"]])
    return Program(run, *sides, read.in_shardings_jax(mesh) if mesh else (None,) * len(sides[0]))


class Model:
    """A folder's programs and weights (by name, if the folder holds none); `check` the weights' checksums, too."""

    def __init__(self, folder, weights=None, check=False):
        folder = pathlib.Path(folder)
        need((folder / "manifest.json").is_file(), f"{folder}: no manifest.json: give what `jaxkv export` has written")
        said = self.said = json.loads((folder / "manifest.json").read_text("utf-8"))
        made, here = said["guaranteed"], export.default_export_platform()
        fits = [*map(int, jax.__version__.split(".")[:2])] >= [*map(int, made["jax"].split(".")[:2])]
        fits = fits and made["calling_convention"] >= export.minimum_supported_calling_convention_version
        need(fits, f"{folder}: exported by jax {made['jax']}, jax {jax.__version__} is outside its window: export anew")
        need(here in said["platforms"], f"platform={here}: {folder} was exported for {', '.join(said['platforms'])}")
        mesh, many = said["mesh"], said["devices"]
        need(many <= jax.device_count(), f"{folder}: exported for {many} devices, here are {jax.device_count()}")
        mesh = mesh and jax.make_mesh(tuple(mesh.values()), tuple(mesh), devices=jax.devices()[:many])
        mine = {(e["kind"], e["slots"], e["batch"]): e for e in said["programs"] if e["platform"] == here}
        self.programs = {key: program(folder, each, mesh) for key, each in mine.items()}
        self.lengths = {int(slots): dict(tensors(folder, of["files"])) for slots, of in said["lengths"].items()}
        need(weights or said["weights"], f"weights=None: {folder} holds none: give arrays by name")
        given = dict(weights or tensors(folder, said["weights"]["files"], check))
        lost = [name for name in said["parameters"] if name not in given]
        need(not lost, f"weights: {lost[:3]} are missing")
        of = self.programs["prompt", min(self.lengths), min(said["batch"])]
        there = [(name, where) for name, where in zip(of.inputs, of.there, strict=True) if name in given]
        self.weights, self.text = {name: jax.device_put(given[name], where) for name, where in there}, None
        if said["text"] and importlib.util.find_spec("tokenizers"):
            path = found(folder / "tokenizer.json", said["text"])
            self.text = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))

    def run(self, kind, at, arrays):
        of, every = self.programs[kind, *at], self.weights | arrays
        given = [jax.device_put(every[name], there) for name, there in zip(of.inputs, of.there, strict=True)]
        return arrays | dict(zip(of.outputs, of.run(*given), strict=True))

    def again(self, arrays, at, now=True):
        """Compresses what has grown as far as it may; and how many tokens can be drawn before that is due."""
        over = int((np.asarray(arrays["cache.length"]) - np.asarray(arrays["cache.limit"])).max())
        left = (self.said["every"] or 1) - over - int(arrays.get("beside.used", 0))
        if ("again", *at) in self.programs and left < 1 and now:
            arrays = self.run("settle", at, arrays) if "beside.used" in arrays else arrays
            return self.again(self.run("again", at, arrays), at, now=False)
        return arrays, left if self.said["every"] else 1 << 30

    def read(self, ids, cache=None, seed=0, turn=None):
        """A cache of prompts, lists of ids; or of what comes on top of one of as many sequences, or of one."""
        count, longest, said = len(ids), max(map(len, ids), default=0), self.said
        fine = count and all(len(row) and min(row) >= 0 and max(row) < said["vocab"] for row in ids)
        need(fine, f"prompt: give lists of ids in [0, {said['vocab']}), none of them empty")
        slots = [at for at in sorted(self.lengths) if at >= longest] if cache is None else [cache.at[0]]
        batch = [at for at in sorted(said["batch"]) if at >= max(count, 0 if cache is None else cache.at[1])]
        fits = cache is None or (cache.count in (1, count) and longest <= min(cache.room, said["question"]))
        told = (
            f"{max(self.lengths)} tokens"
            if cache is None
            else f"{said['question']} tokens on top, room for {cache.room}"
        )
        need(slots and batch and fits, f"prompt: {count} of {longest} tokens: exported for {said['batch']} of {told}")
        at, rows = (slots[0], batch[0]), [*ids, *ids[-1:] * (batch[0] - count)]
        kind, lengths = "prompt" if cache is None else "question", np.asarray([*map(len, rows)], np.int32)
        width = self.programs[kind, *at].inputs["tokens"][2]
        tokens = np.zeros((at[1], -(-longest // width) * width), np.int32)
        for to, row in zip(tokens, rows, strict=True):
            to[: len(row)] = row
        arrays = self.own(cache, at) if cache else {name: a[..., lengths] for name, a in self.lengths[at[0]].items()}
        need(
            cache or (arrays["told.budget"] >= 0).all(), f"prompt: too short for the policy's budget: {lengths} tokens"
        )
        arrays |= {"length": lengths, "key": np.asarray([0, seed], np.uint32)}
        for first in range(0, longest, width):
            step = {"tokens": tokens[:, first : first + width], "count": np.clip(lengths - first, 0, width)}
            arrays = self.run(kind, at, arrays | step)
        need(arrays.get("ordered", True), "scores: NaN: the model's attention is not finite: check its weights")
        room = cache.room - longest * said["grows"] if cache else said["question"] + said["new"]
        return Cache(self.again(arrays, at)[0], at, count, room, turn)

    def own(self, cache, at):
        """A copy of a cache's arrays, which programs then write; of one sequence's for several."""
        wide = lambda a, to: jax.numpy.copy(jax.numpy.broadcast_to(a, to))
        of = self.programs["draw.Greedy", *at].inputs.items()
        return {name: wide(cache.arrays[name], to) for name, (_, *to) in of if name in cache.arrays}

    def draw(self, cache, n, tell=None, seed=0, stop_at_eos=True, sampling="Greedy", **numbers):
        """Ids `[B, n]` drawn, -1 behind a sequence's end, and the cache then; `tell` is called with a few at a time."""
        kind, at, said, parts = f"draw.{sampling}", cache.at, self.said, []
        of, numbers = self.programs[kind, *at], said["samplings"][sampling] | numbers
        need(0 < n <= cache.room, f"max_new_tokens={n}: there is room for {cache.room}: export with more")
        out = {
            f"sampling.{name}": np.asarray(value, of.inputs[f"sampling.{name}"][0]) for name, value in numbers.items()
        }
        out |= self.own(cache, at) | {"key": np.asarray([0, seed], np.uint32), "done": np.arange(at[1]) >= cache.count}
        out["eos"] = np.asarray(said["eos"] if stop_at_eos else [-2] * len(said["eos"]), np.int32)
        while n and not np.asarray(out["done"]).all():
            out, left = self.again(out, at)
            steps = min(n, left, 8 if tell else of.outputs["drawn"][2])
            if "beside.used" in out and int(out["beside.used"]) + steps > of.outputs["drawn"][2]:
                out = self.run("settle", at, out)
            out = self.run(kind, at, out | {"steps": np.int32(steps)})
            parts, n = [*parts, np.asarray(out["drawn"])[: cache.count, : int(out["ran"])]], n - int(out["ran"])
            tell and tell(parts[-1])
        out, drawn = self.run("settle", at, out) if "beside.used" in out else out, np.concatenate(parts, axis=1)
        return drawn, cache._replace(arrays=self.again(out, at)[0], room=cache.room - drawn.shape[1] * said["grows"])

    def ids_of(self, prompt, turn, close=True):
        """Ids of one prompt: they themselves, or a text's, as a user's message where there is a chat template."""
        if not isinstance(prompt, str):
            return list(prompt)
        need(self.text, "prompt: give token ids: there is no tokenizer.json, or no package tokenizers")
        opening, closing, between = self.said["text"]["turns"] or ("", "", "")
        begun, bos = opening if turn is None else between if turn == "answer" else "", self.said["text"]["bos"]
        ids = self.text.encode(begun + prompt + closing * close, add_special_tokens=False).ids
        return [bos, *ids] if turn is None and bos is not None and ids[:1] != [bos] else ids

    def generate(self, prompt, max_new_tokens=128, cache=None, tell=None, seed=0, **drawing):
        """Answers a prompt or several: texts, or lists of ids; `tell` is called with text as it comes, or with ids."""
        single = isinstance(prompt, str) or not isinstance(prompt[0], (str, list, tuple, np.ndarray))
        ids = [self.ids_of(each, cache and cache.turn) for each in ([prompt] if single else prompt)]
        said, shown = [[] for _ in ids], [""]

        def heard(drawn):
            for row, new in zip(said, drawn, strict=True):
                row.extend(new[new >= 0].tolist())
            text = self.text and self.text.decode(said[0]).rstrip("\ufffd")
            tell(drawn if text is None or not single else text[len(shown[0]) :])
            shown[0] = text

        drawn, cache = self.draw(self.read(ids, cache, seed), max_new_tokens, tell and heard, seed, **drawing)
        tokens = [row[row >= 0].tolist() for row in drawn]
        text = self.text and [self.text.decode(row) for row in tokens]
        return Answer(
            *((each[0] if single and each else each) for each in (tokens, text)), cache._replace(turn="answer")
        )


if __name__ == "__main__":
    tell = lambda new: print(new, end="", flush=True)
    Model(pathlib.Path(__file__).parent).generate(sys.argv[1], int((*sys.argv, 128)[2]), tell=tell)
    print()
