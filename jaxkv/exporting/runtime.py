"""Generates from a folder written by `jaxkv export`, with only jax and numpy, without jaxkv."""

import collections.abc
import hashlib
import importlib.util
import json
import numbers
import pathlib
import sys

import jax.export
import numpy as np

TOKENIZERS = importlib.util.find_spec("tokenizers") and importlib.import_module("tokenizers")
DTYPES = {"F32": np.float32, "BF16": jax.numpy.bfloat16, "F16": np.float16, "I32": np.int32}
# Numeric arguments of sampling: type, smallest and largest value, text of the remedy.
BOUNDS = {
    "max_new_tokens": (int, 1, np.inf, "a whole number: sample at least 1 token"),
    "seed": (int, 0, 2**32 - 1, f"a whole number in [0, {2**32})"),
    "temperature": (numbers.Real, 0, np.inf, "a number of 0 or more"),
    "top_k": (int, 0, 2**31 - 1, f"a whole number of tokens in [0, {2**31}), 0 for all"),
    "top_p": (numbers.Real, 5e-324, 1, "a probability in (0, 1]"),
    "min_p": (numbers.Real, 0, 1, "a share in [0, 1]"),
}
# Immutable cache of `count` sequences: arrays by name, the (padded_len, batch) of its programs, headroom in tokens, the
# turn of each conversation, and checksum and folder of the export.
Cache = collections.namedtuple("Cache", "arrays at count headroom turns of")


def need(fine, message, kind=ValueError):
    if not fine:
        raise kind(message)


def plain(value):  # Python scalar of a numpy or jax scalar; anything else unchanged
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_id(value):
    return isinstance(value, int) and not isinstance(value, bool)


def listed(given):  # list of an array or a sequence; text unchanged
    given = (
        np.asarray(given).tolist() if hasattr(given, "ndim") and hasattr(given, "dtype") else given
    )
    fits = isinstance(given, collections.abc.Sequence) and not isinstance(
        given, (bytes, bytearray, memoryview)
    )
    need(
        fits,
        f"prompt={type(given).__name__}: not a prompt: use text, token ids, or a list of them",
        TypeError,
    )
    return given if isinstance(given, str) else [*map(plain, given)]


def prompts(given):  # list of prompts, and True for a single prompt
    one = isinstance(items := listed(given), str) or bool(items and is_id(items[0]))
    return need(items, f"prompt={given!r}: no prompt: use at least one") or (
        [items] if one else items,
        one,
    )


def found(path, of, check=True):
    sound = path.is_file() and path.stat().st_size == of["bytes"]
    sound = sound and (not check or hashlib.sha256(path.read_bytes()).hexdigest() == of["sha256"])
    return (
        need(
            sound,
            f"{path}: {'damaged' if path.is_file() else 'missing'}: copy the whole folder again",
        )
        or path
    )


def tensors(folder, files, check=True):
    for name, of in files.items():
        raw = np.memmap(found(folder / name, of, check), np.uint8, "r")
        data = raw[8 + (size := int.from_bytes(raw[:8].tobytes(), "little")) :]
        for each, at in json.loads(raw[8 : 8 + size].tobytes()).items():
            yield (
                each,
                data[slice(*at["data_offsets"])].view(DTYPES[at["dtype"]]).reshape(at["shape"]),
            )


def program(folder, said, mesh):
    path = found(folder / "programs" / said["file"], said)
    sides = []
    try:
        read = jax.export.deserialize(bytearray(path.read_bytes()))
    except Exception as error:
        raise ValueError(
            f"{path}: jax {jax.__version__} cannot read it ({error}): export again"
        ) from error
    for side, avals in (("inputs", read.in_avals), ("outputs", read.out_avals)):
        told = {
            e["name"]: (e["dtype"], *(said["batch"] if n == "B" else n for n in e["shape"]))
            for e in said[side]
        }
        have = [(aval.dtype.name, *aval.shape) for aval in avals]
        odd = next(
            (
                f"{name} {a}, here {b}"
                for (name, a), b in zip(told.items(), have, strict=False)
                if a != b
            ),
            side,
        )
        need(list(told.values()) == have, f"{path}: differs from the manifest, {odd}: export again")
        sides.append(told)
    run = jax.jit(
        read.call, donate_argnums=[at for at, each in enumerate(said["inputs"]) if each["donated"]]
    )
    one = {
        e["name"]: (*[np.s_[:]] * e["shape"].index("B"), np.s_[:1])
        for e in said["inputs"]
        if "B" in e["shape"]
    }
    return run, *sides, read.in_shardings_jax(mesh) if mesh else (None,) * len(sides[0]), one


class Model:
    def __init__(self, folder, weights=None, check=False):
        path = (folder := pathlib.Path(folder)) / "manifest.json"
        try:
            said = self.said = json.loads(raw := path.read_bytes())
            need(
                (said["format"], said["version"]) == ("jaxkv export", 5),
                "another version than this runtime.py's",
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}: {error}: use a complete folder written by `jaxkv export`"
            ) from error
        self.of = hashlib.sha256(raw).hexdigest(), str(folder)
        made = said["guaranteed"]
        here = jax.export.default_export_platform()
        mesh = said["mesh"]
        many = said["devices"]
        fits = jax.__version_info__[:2] >= tuple(made["from"])
        need(
            fits,
            f"{folder}: exported by jax {made['jax']}, and jax {jax.__version__} is outside its window: export again",
        )
        fits = here in said["platforms"] and many <= jax.device_count()
        need(
            fits,
            f"{folder}: exported for {many} devices of {said['platforms']}, not {jax.device_count()} of {here}",
        )
        mesh = mesh and jax.sharding.Mesh(
            np.reshape(jax.devices()[:many], tuple(mesh.values())), tuple(mesh)
        )
        mine = {
            (e["kind"], e["padded_len"], e["batch"]): e
            for e in said["programs"]
            if e["platform"] == here
        }
        self.programs = {key: program(folder, each, mesh) for key, each in mine.items()}
        self.lengths = {
            int(slots): dict(tensors(folder, files)) for slots, files in said["lengths"].items()
        }
        given = dict(weights or tensors(folder, said["weights"], check))
        names = set(said["parameters"])
        need(
            names <= set(given),
            f"weights: {sorted(names - set(given))[:2]} are missing: pass arrays by name",
        )
        _, inputs, _, there, _ = self.programs["prompt", min(self.lengths), min(said["batch"])]
        self.weights = {
            n: jax.device_put(given[n], at)
            for n, at in zip(inputs, there, strict=True)
            if n in names
        }
        self.text = (
            said["text"] and TOKENIZERS and self.tokenizer(folder / "tokenizer.json", said["text"])
        )

    def run(self, kind, at, arrays):
        run, inputs, outputs, there, _ = self.programs[kind, *at]
        every = self.weights | arrays
        return arrays | dict(
            zip(outputs, run(*map(jax.device_put, (every[n] for n in inputs), there)), strict=True)
        )

    def again(
        self, arrays, at
    ):  # recompresses if due; returns arrays, and tokens until the next recompression
        every = self.said["every"]
        over = lambda a: int((np.asarray(a["cache.length"]) - a["cache.limit"]).max())
        due = ("again", *at) in self.programs and over(arrays) >= (every or 1)
        arrays = self.run("again", at, arrays) if due else arrays
        return arrays, every - over(arrays) if every else 1 << 30

    def own(
        self, arrays, at, seed, one=False
    ):  # copy that programs may donate; `one`: first sequence for all
        _, of, _, _, first = self.programs["sample.Greedy", *at]
        own = {
            name: arrays[name][first.get(name, ...) if one else ...]
            for name in of
            if name in arrays
        }
        own = {
            name: jax.numpy.copy(jax.numpy.broadcast_to(own[name], of[name][1:])) for name in own
        }
        return own | {"key": np.asarray([0, seed], np.uint32)}

    def known(self, cache):  # rejects anything but a cache of this export
        told = f"cache={type(cache).__name__}: not a cache: use one that read or generate returned"
        need(getattr(cache, "_fields", None) == Cache._fields, told, TypeError)
        told = f"cache={cache.of[1]}: from another export than {self.of[1]}: read the prompt with this one"
        need(cache.of[0] == self.of[0], told)

    def tokenizer(
        self, path, said
    ):  # encodes names of special tokens as text, except in the template's turns
        text = TOKENIZERS.Tokenizer.from_file(str(found(path, said)))
        text.add_tokens(
            [TOKENIZERS.AddedToken(name, **flags) for name, (_, flags) in said["special"].items()]
        )
        text.encode_special_tokens = True
        self.special = {
            text.token_to_id(name): index for name, (index, _) in said["special"].items()
        }
        return text

    def tokens(
        self, item, turn, close
    ):  # ids of a prompt, and the turn of the conversation after it
        if not isinstance(row := listed(item), str):
            kinds = ", ".join(sorted({type(each).__name__ for each in row if not is_id(each)}))
            need(
                not kinds,
                f"prompt=a list of {kinds}: not a prompt: use text, token ids, or a list of them",
                TypeError,
            )
            return row, "raw"
        need(
            self.text,
            f"prompt={row[:40]!r}: no tokenizer: use token ids, or pip install tokenizers",
        )
        row = "".join(
            "\ufffd" if "\ufdd0" <= each <= "\ufdef" else each for each in row
        )  # reserved for names of special tokens
        for content, spelling in self.said["text"]["spellings"].items():
            row = row.replace(content, spelling)
        bos = self.said["text"]["bos"]
        start = turn == "start"
        whole = row
        turn = turn if self.said["text"]["turns"] else "raw"
        if turn != "raw":
            opening, closing, between, at_start, at_end = self.said["text"]["turns"]
            before = {
                "start": opening,
                "answer": between,
                "user": "" if row[:1] in ("\n", "\r") else "\n\n",
            }[turn]
            whole = whole.lstrip() if at_start and turn != "user" else whole
            whole = before + (whole.rstrip() if at_end and close else whole) + closing * close
        try:
            found = self.text.encode(whole, add_special_tokens=False).ids if row else []
        except (
            Exception
        ) as error:  # half of a surrogate pair, or a failure of the tokenizer's own rules
            raise ValueError(
                f"prompt={row[:40]!r}: the tokenizer cannot encode it ({error}): use another one"
            ) from error
        ids = [index for each in found if (index := self.special.get(each, each)) is not None]
        ids = [bos] * (bool(row) and start and bos not in (None, *ids[:1])) + ids
        return ids, turn if turn == "raw" else "answer" if close else "user"

    def encode(
        self, items, turns, close
    ):  # ids of each prompt and the turn after it, as in `jaxkv.generate`
        held = len(turns)
        vocab = self.said["vocab"]
        need(
            held in (1, len(items)),
            f"prompt={len(items)} prompts: the cache has {held} sequences: use as many prompts, or a cache of 1",
        )
        rows = [self.tokens(item, turns[at % held], close) for at, item in enumerate(items)]
        for item, (row, _) in zip(items, rows, strict=True):
            need(row, f"prompt={item!r}: no tokens: use at least one")
            need(
                0 <= min(row) and max(row) < vocab,
                f"prompt={min(row), max(row)}: token ids out of range: use ids in [0, {vocab})",
            )
        return zip(*rows, strict=True)

    def fits(
        self, lengths, new, cache
    ):  # padded length and batch of the programs; rejects as `jaxkv.generate` does
        said = self.said
        count = len(lengths)
        longest = int(lengths.max())
        of = (
            min((said["question"], "question"), (cache.headroom, "new"))
            if cache
            else (max(self.lengths), "lengths")
        )
        headroom = cache.headroom - longest * said["grows"] if cache else said["headroom"]
        batch = [each for each in said["batch"] if each >= max(count, cache.at[1] if cache else 0)]
        need(
            batch,
            f"prompt={count} prompts: at most {max(said['batch'])}: use fewer, or export with batch={count}",
        )
        need(
            longest <= of[0],
            f"prompt={longest} tokens: at most {of[0]}: use fewer, or export with more {of[1]}=",
        )
        need(
            new <= headroom,
            f"max_new_tokens={new}: the cache has headroom for {headroom}: lower it, or export with new={new}",
        )
        # If positions count cached entries, `jaxkv export` has checked all but the prompt's own.
        seen, new = (
            (0, 0)
            if said["rolling"]
            else (np.asarray(cache.arrays["cache.seen"])[:count] if cache else 0, new)
        )
        total = int((lengths + seen).max()) + new
        limit = said["positions"]
        told = f"the model was made for {limit}: shorten the prompt or lower max_new_tokens"
        need(total <= limit, f"prompt='{total} tokens, {new} new ones included': {told}")
        slots = cache.at[0] if cache else min(each for each in self.lengths if each >= longest)
        small = [] if cache else lengths[self.lengths[slots]["told.budget"][lengths] < 0].tolist()
        need(
            not small,
            f"prompt={small} tokens: the policy's budget is too small: export with a larger one",
        )
        return (slots, min(batch)), headroom

    @np.errstate(over="ignore", under="ignore")
    def asked(
        self, new, seed=0, /, stop_at_eos=True, sampling="Greedy", **given
    ):  # validated arguments of a program
        said = self.said["samplings"]
        out = {}
        stop = plain(stop_at_eos)
        need(isinstance(stop, bool), f"stop_at_eos={stop_at_eos!r}: not a bool: use True or False")
        need(
            isinstance(sampling, str) and sampling in said,
            f"sampling={sampling!r}: unknown: use one of {said}",
        )
        odd = ", ".join(sorted(set(given) - set(said[sampling])))
        need(
            not odd,
            f"{odd}: not an argument of sampling={sampling!r}: use some of {[*said[sampling]]}",
        )
        for name, value in ({"max_new_tokens": new, "seed": seed} | said[sampling] | given).items():
            kind, low, high, remedy = BOUNDS[name]
            out[name] = plain(value)
            fits = (
                isinstance(out[name], kind)
                and not isinstance(out[name], bool)
                and low <= out[name] <= high
            )
            need(fits, f"{name}={value!r}: invalid: use {remedy}")
        new = out.pop("max_new_tokens")
        seed = out.pop("seed")
        eos = np.where(stop, self.said["eos"], -2)
        as_32 = {
            name: np.full(1, min(each, 1e300), {"top_k": np.int32}.get(name, np.float32))
            for name, each in out.items()
        }
        as_32 = {f"sampling.{name}": each for name, each in as_32.items()} | {
            "eos": eos.astype(np.int32)
        }
        return new, seed, f"sample.{sampling}", as_32

    def read(self, prompt, cache=None, seed=0, new=0, close=False):
        """Prefill prompts or extend a copy of `cache`; recompress if due; return a cache. `close` ends user turns."""
        _, seed, _, _ = self.asked(1, seed)
        cache is None or self.known(cache)
        ids, turns = self.encode(prompts(prompt)[0], cache.turns if cache else ("start",), close)
        count = len(ids)
        lengths = np.asarray([*map(len, ids)], np.int32)
        at, headroom = self.fits(lengths, new, cache)
        longest = int(lengths.max())
        kind = "question" if cache else "prompt"
        rows = [*ids, *ids[-1:] * (at[1] - count)]
        wide = self.programs[kind, *at][1]["tokens"][2]
        lengths = np.asarray([*map(len, rows)], np.int32)
        tokens = np.asarray(
            [[*row, *[0] * (-(-longest // wide) * wide - len(row))] for row in rows], np.int32
        )
        out = self.own(cache.arrays if cache else {}, at, seed, cache and cache.count == 1) | {
            "length": lengths
        }
        out |= (
            {}
            if cache
            else {name: table[..., lengths] for name, table in self.lengths[at[0]].items()}
        )
        for i in range(0, longest, wide):
            out = self.run(
                kind,
                at,
                out | {"tokens": tokens[:, i : i + wide], "count": np.clip(lengths - i, 0, wide)},
            )
        need(
            out.get("ordered", True),
            "scores: NaN: the model's attention is not finite: check its weights",
        )
        return Cache(self.again(out, at)[0], at, count, headroom, turns, self.of)

    def sample(self, cache, max_new_tokens, tell=None, seed=0, **options):
        """Sample up to `max_new_tokens`; pass all ids so far to `tell`; return ids `[B, n]`, -1 after an end; cache."""
        self.known(cache)
        new, seed, kind, given = self.asked(max_new_tokens, seed, **options)
        at, _ = self.fits(np.zeros(cache.count, np.int32), new, cache)
        sampled = np.zeros((cache.count, 0), np.int32)
        size = self.programs[kind, *at][2]["sampled"][2]
        given["done"] = np.arange(at[1]) >= cache.count
        out = self.own(cache.arrays, at, seed) | given
        while sampled.shape[1] < new and not np.asarray(out["done"]).all():
            out, left = self.again(out, at)
            steps = min(new - sampled.shape[1], left, 8 if tell else size)
            out = self.run(kind, at, out | {"steps": np.int32(steps)})
            sampled = np.append(
                sampled, np.asarray(out["sampled"])[: cache.count, : int(out["ran"])], axis=1
            )
            need(
                (sampled < (vocab := self.said["vocab"])).all(),
                f"{kind}: sampled an id outside of [0, {vocab})",
            )
            tell and tell(sampled)
        arrays = self.again(out, at)[0]
        headroom = cache.headroom - sampled.shape[1] * self.said["grows"]
        return sampled, cache._replace(arrays=arrays, headroom=headroom)

    def generate(self, prompt, max_new_tokens=None, cache=None, tell=None, seed=0, **options):
        """Generate answers to a prompt or list; return (lists of) ids, text (None without tokenizer), and the cache."""
        new = self.asked(
            self.said["new"] if max_new_tokens is None else max_new_tokens, seed, **options
        )[0]
        sampled, cache = self.sample(
            self.read(prompt, cache, seed, new, True), new, tell, seed, **options
        )
        tokens = [row[row >= 0].tolist() for row in sampled]
        text = self.text and [*map(self.text.decode, tokens)]
        return (tokens[0], text and text[0], cache) if prompts(prompt)[1] else (tokens, text, cache)


if __name__ == "__main__":
    len(sys.argv) == 2 and sys.argv[1] not in ("-h", "--help") or sys.exit(
        f"usage: {sys.argv[0]} 'PROMPT'"
    )
    model = Model(pathlib.Path(__file__).parent)
    shown = ""

    def tell(sampled):
        global shown
        before = shown
        shown = model.text.decode(sampled[0][sampled[0] >= 0]).rstrip("\ufffd")
        print(shown[len(before) :], end="", flush=True)

    model.generate(sys.argv[1:2], tell=tell)
