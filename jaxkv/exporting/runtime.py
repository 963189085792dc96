"""Generates from a folder that `jaxkv export` has written, with jax and numpy alone: without jaxkv."""

import collections
import hashlib
import importlib.util
import json
import pathlib
import sys

import jax.export
import numpy as np

TOKENIZERS = importlib.util.find_spec("tokenizers") and importlib.import_module("tokenizers").Tokenizer.from_file
DTYPES = {"F32": np.float32, "BF16": jax.numpy.bfloat16, "F16": np.float16, "I32": np.int32}
# Rows of `count` sequences by name, of programs `at` (slots, batch); `room` tokens fit. A value: nothing changes it.
Cache = collections.namedtuple("Cache", "arrays at count room")


def need(fine, message):
    if not fine:
        raise ValueError(message)


def found(path, of, check=True):
    sound = path.is_file() and path.stat().st_size == of["bytes"]
    sound = sound and (not check or hashlib.sha256(path.read_bytes()).hexdigest() == of["sha256"])
    return need(sound, f"{path}: {'damaged' if path.is_file() else 'missing'}: copy the whole folder again") or path


def tensors(folder, files, check=True):
    for name, of in files.items():
        raw = np.memmap(found(folder / name, of, check), np.uint8, "r")
        data = raw[8 + (size := int.from_bytes(raw[:8].tobytes(), "little")) :]
        for each, at in json.loads(raw[8 : 8 + size].tobytes()).items():
            yield each, data[slice(*at["data_offsets"])].view(DTYPES[at["dtype"]]).reshape(at["shape"])


def program(folder, said, mesh):
    path, sides = found(folder / "programs" / said["file"], said), []
    try:
        read = jax.export.deserialize(bytearray(path.read_bytes()))
    except Exception as error:
        raise ValueError(f"{path}: jax {jax.__version__} cannot read it ({error}): export anew") from error
    for side, avals in (("inputs", read.in_avals), ("outputs", read.out_avals)):
        told = {e["name"]: (e["dtype"], *(said["batch"] if n == "B" else n for n in e["shape"])) for e in said[side]}
        have = [(aval.dtype.name, *aval.shape) for aval in avals]
        odd = next((f"{name} {a}, here {b}" for (name, a), b in zip(told.items(), have, strict=False) if a != b), side)
        need(list(told.values()) == have, f"{path}: not as the manifest says, {odd}: export anew")
        sides.append(told)
    run = jax.jit(read.call, donate_argnums=[at for at, each in enumerate(said["inputs"]) if each["donated"]])
    one = {e["name"]: (*[np.s_[:]] * e["shape"].index("B"), np.s_[:1]) for e in said["inputs"] if "B" in e["shape"]}
    return run, *sides, read.in_shardings_jax(mesh) if mesh else (None,) * len(sides[0]), one


class Model:
    def __init__(self, folder, weights=None, check=False):
        path = (folder := pathlib.Path(folder)) / "manifest.json"
        try:
            said = self.said = json.loads(path.read_text("utf-8"))
            need((said["format"], said["version"]) == ("jaxkv export", 1), "not of this runtime.py's version")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}: {error}: give a folder that `jaxkv export` has written, whole") from error
        made, here, mesh, many = said["guaranteed"], jax.export.default_export_platform(), said["mesh"], said["devices"]
        fits = jax.__version_info__[:2] >= tuple(made["from"])
        need(fits, f"{folder}: made by jax {made['jax']}, jax {jax.__version__} is outside its window: export anew")
        fits = here in said["platforms"] and many <= jax.device_count()
        need(fits, f"{folder}: made for {many} devices of {said['platforms']}, here are {jax.device_count()} of {here}")
        mesh = mesh and jax.sharding.Mesh(np.reshape(jax.devices()[:many], tuple(mesh.values())), tuple(mesh))
        mine = {(e["kind"], e["slots"], e["batch"]): e for e in said["programs"] if e["platform"] == here}
        self.programs = {key: program(folder, each, mesh) for key, each in mine.items()}
        self.lengths = {int(slots): dict(tensors(folder, files)) for slots, files in said["lengths"].items()}
        given, names = dict(weights or tensors(folder, said["weights"], check)), set(said["parameters"])
        need(names <= set(given), f"weights: {sorted(names - set(given))[:2]} are missing: give arrays by name")
        _, inputs, _, there, _ = self.programs["prompt", min(self.lengths), min(said["batch"])]
        self.weights = {n: jax.device_put(given[n], at) for n, at in zip(inputs, there, strict=True) if n in names}
        self.text = said["text"] and TOKENIZERS and TOKENIZERS(str(found(folder / "tokenizer.json", said["text"])))

    def run(self, kind, at, arrays):
        (run, inputs, outputs, there, _), every = self.programs[kind, *at], self.weights | arrays
        return arrays | dict(zip(outputs, run(*map(jax.device_put, (every[n] for n in inputs), there)), strict=True))

    def again(self, arrays, at, close=False):  # compresses what is due; how many tokens can be drawn before it is
        every, over = self.said["every"], lambda a: int((np.asarray(a["cache.length"]) - a["cache.limit"]).max())
        due = ("again", *at) in self.programs and over(arrays) + int(arrays.get("beside.used", 0)) >= (every or 1)
        arrays = self.run("settle", at, arrays) if (due or close) and "beside.used" in arrays else arrays
        arrays = self.run("again", at, arrays) if due and over(arrays) >= (every or 1) else arrays
        return arrays, every - over(arrays) - int(arrays.get("beside.used", 0)) if every else 1 << 30

    def own(self, arrays, at, seed, one=False):  # a copy, which programs may write; of the first sequence's for all
        _, of, _, _, first = self.programs["draw.Greedy", *at]
        own = {name: arrays[name][first.get(name, ...) if one else ...] for name in of if name in arrays}
        own = {name: jax.numpy.copy(jax.numpy.broadcast_to(own[name], of[name][1:])) for name in own}
        return own | {"key": np.asarray([0, seed], np.uint32)}

    def read(self, ids, cache=None, seed=0):
        """A cache of prompts, lists of ids; or of what comes on top of one, of as many sequences or of one."""
        said, ids = self.said, [np.asarray(row) for row in ids]
        count, longest = len(ids), max((row.size for row in ids), default=0)
        most = min(cache.room, said["question"]) * (cache.count in (1, count)) if cache else max(self.lengths)
        batch = [each for each in said["batch"] if each >= max(count, cache.at[1] if cache else 0)]
        fits = all(a.ndim == 1 and a.dtype.kind in "iu" and 0 <= a.min() < said["vocab"] > a.max() for a in ids)
        told = f"give {said['batch']}, or as many as the cache holds, of 1 to {most} ids in [0, {said['vocab']})"
        need(count and batch and longest <= most and fits, f"prompt: {count} of up to {longest} tokens: {told}")
        at = cache.at[0] if cache else min(each for each in self.lengths if each >= longest), min(batch)
        kind, rows = "question" if cache else "prompt", [*ids, *ids[-1:] * (at[1] - count)]
        wide, lengths = self.programs[kind, *at][1]["tokens"][2], np.asarray([row.size for row in rows], np.int32)
        tokens = np.asarray([[*row, *[0] * (-(-longest // wide) * wide - row.size)] for row in rows], np.int32)
        out = self.own(cache.arrays if cache else {}, at, seed, cache and cache.count == 1) | {"length": lengths}
        out |= {} if cache else {name: table[..., lengths] for name, table in self.lengths[at[0]].items()}
        need(cache or out["told.budget"].min() >= 0, f"prompt: the policy's budget is too small for {lengths} tokens")
        for i in range(0, longest, wide):
            out = self.run(kind, at, out | {"tokens": tokens[:, i : i + wide], "count": np.clip(lengths - i, 0, wide)})
        need(out.get("ordered", True), "scores: NaN: the model's attention is not finite: check its weights")
        return Cache(self.again(out, at)[0], at, count, cache.room - longest * said["grows"] if cache else said["room"])

    def draw(self, cache, n, tell=None, seed=0, stop_at_eos=True, sampling="Greedy", **numbers):
        """Ids `[B, n]` drawn, -1 behind a sequence's end, and the cache then; `tell` hears all so far now and then."""
        kind, at, said, drawn = f"draw.{sampling}", cache.at, self.said, np.zeros((cache.count, 0), np.int32)
        need(n in range(1, cache.room + 1), f"max_new_tokens={n}: there is room for {cache.room}")
        need(sampling in said["samplings"], f"sampling={sampling!r}: give of {said['samplings']}")
        (_, inputs, outputs, _, _), out = self.programs[kind, *at], self.own(cache.arrays, at, seed)
        for name, value in (said["samplings"][sampling] | numbers).items():
            out[f"sampling.{name}"] = np.asarray(value, inputs[f"sampling.{name}"][0])
        out |= {"done": np.arange(at[1]) >= cache.count, "eos": np.where(stop_at_eos, said["eos"], -2).astype(np.int32)}
        while drawn.shape[1] < n and not np.asarray(out["done"]).all():
            out, left = self.again(out, at)
            steps = min(n - drawn.shape[1], left, 8 if tell else outputs["drawn"][2])
            out = self.run("settle", at, out) if int(out.get("beside.used", 0)) + steps > outputs["drawn"][2] else out
            out = self.run(kind, at, out | {"steps": np.int32(steps)})
            drawn = np.append(drawn, np.asarray(out["drawn"])[: cache.count, : int(out["ran"])], axis=1)
            tell and tell(drawn)
        return drawn, Cache(self.again(out, at, True)[0], at, cache.count, cache.room - drawn.shape[1] * said["grows"])

    def generate(self, prompts, max_new_tokens=None, cache=None, tell=None, seed=0, **drawing):
        """Tokens for each prompt, a text or a list of ids; their text, if there is a tokenizer; and the cache."""
        said, ids = self.said["text"], list(prompts)
        need(self.text or str not in map(type, ids), "prompt: there is no tokenizer here: give lists of token ids")
        for at in [at for at, text in enumerate(ids) if isinstance(text, str)]:
            text = said["turns"][2 if cache else 0] + ids[at] + said["turns"][1]
            ids[at] = self.text.encode(text, add_special_tokens=False).ids
            ids[at] = [said["bos"]] * (not cache and said["bos"] not in (None, *ids[at][:1])) + ids[at]
        drawn, cache = self.draw(self.read(ids, cache, seed), max_new_tokens or self.said["new"], tell, seed, **drawing)
        tokens = [row[row >= 0].tolist() for row in drawn]
        return tokens, self.text and [self.text.decode(row) for row in tokens], cache


if __name__ == "__main__":
    model, text = Model(pathlib.Path(__file__).parent), lambda drawn: model.text.decode(drawn[0][drawn[0] >= 0])
    told, more = [""], lambda drawn: told.__iadd__([text(drawn).rstrip("\ufffd")])[-1][len(told[-2]) :]
    model.generate(sys.argv[1:2], tell=lambda drawn: print(more(drawn), end="", flush=True))
