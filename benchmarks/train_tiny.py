"""Trains the tiny model that comes with jaxkv: a Llama of under a million parameters that finds what it is asked for.

    python -m benchmarks.train_tiny DIR              all stages; ended half-way, the same command goes on
    python -m benchmarks.train_tiny DIR --export     what it has come to, as a checkpoint in Hugging Face's layout

Every question behind a context is a lesson of its own, so that texts of 128 tokens already teach attention to look
things up; longer texts follow, to 2,048 tokens. Heads of the first two blocks begin near what they will do
(`benchmarks/tiny/model.py`), without which most of an hour goes by before the loss falls. Some 66 minutes on two cores
that other work shares.
"""

import argparse
import dataclasses
import functools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from benchmarks.tiny import lessons, model
from benchmarks.tiny.export import export, find_filters, write_manifest
from benchmarks.tiny.words import tokenizer_of

SEED = 0
# Of the matrices, by Muon; embeddings and norms go by Adam.
RATE, ADAM_RATE, WARM_UP = 0.005, 2e-3, 50
EVERY, SAVE_SECONDS = 25, 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps on texts of one length.

    Attributes:
        length: tokens of a text with its questions.
        batch: texts of a step.
        mix: how often each lesson comes, in shares of any sum.
        share: of a text that is context, between these.
        goal: share of answers without a fault, in every lesson, that ends the stage.
        most: steps that end it in any case.
        rates: factor on the rates of learning, from the stage's first step to its last.
    """

    length: int
    batch: int
    mix: Mapping[str, float]
    share: tuple[float, float] = (0.3, 0.75)
    goal: float = 0.97
    most: int = 1000
    rates: tuple[float, float] = (1.0, 1.0)


ALL = {"pairs": 1, "needles": 2, "variables": 1.5, "two_stage": 1.2, "sums": 0.6}
# Dictionaries are learnt first, sums last.
LATE = {"pairs": 0.5, "needles": 2, "variables": 2, "two_stage": 1.5, "sums": 1.2}
STAGES = (
    Stage(
        length=128, batch=32, mix={"pairs": 1, "needles": 1}, share=(0.3, 0.6), goal=0.9, most=120
    ),
    Stage(length=128, batch=32, mix=ALL, share=(0.2, 0.5), goal=0.97, most=400),
    Stage(length=256, batch=20, mix=ALL, share=(0.2, 0.5), goal=0.98, most=1000),
    Stage(length=512, batch=10, mix=ALL, share=(0.2, 0.7), goal=0.98, most=800, rates=(1.0, 0.8)),
    Stage(length=512, batch=10, mix=LATE, share=(0.2, 0.7), goal=0.98, most=400, rates=(0.8, 0.8)),
    Stage(length=1024, batch=5, mix=LATE, share=(0.2, 0.8), goal=0.98, most=400, rates=(0.8, 0.5)),
    Stage(length=2048, batch=2, mix=LATE, share=(0.3, 0.95), goal=1.1, most=250, rates=(0.5, 0.0)),
)


class Texts(NamedTuple):
    """A batch: token ids `i32[B, S + 1]`, and at tokens of answers the answer's number, from 1, else 0."""

    tokens: np.ndarray
    answer: np.ndarray
    lesson: np.ndarray


def texts_of(rng: np.random.Generator, tokenizer: Any, stage: Stage) -> Texts:
    """Makes a batch."""
    names, shares = list(stage.mix), np.array(list(stage.mix.values()), float)
    tokens = np.full((stage.batch, stage.length + 1), 2, np.int32)
    answer = np.zeros_like(tokens)
    lesson = rng.choice(len(names), stage.batch, p=shares / shares.sum())
    for row, which in enumerate(lesson):
        ids, marks = _text(rng, tokenizer, names[which], stage)
        tokens[row, : len(ids)], answer[row, : len(ids)] = ids, marks
    return Texts(tokens, answer, lesson)


def _text(
    rng: np.random.Generator, tokenizer: Any, name: str, stage: Stage
) -> tuple[list[int], list[int]]:
    headroom = int(stage.length * rng.uniform(*stage.share))
    while True:
        text, asked = lessons.LESSONS[name](rng, max(headroom, 16))
        ids = [1, *tokenizer.encode(text).ids]
        # With room for one question at least.
        if len(ids) < stage.length - 24:
            break
        headroom = int(headroom * 0.8)
    marks, count, misses = [0] * len(ids), 0, 0
    while misses < 2:
        question, told = next(asked)
        before, after = tokenizer.encode(question).ids, [*tokenizer.encode(told).ids, 2]
        if len(ids) + len(before) + len(after) > stage.length + 1:
            misses += 1
            continue
        count += 1
        ids += before + after
        marks += [0] * len(before) + [count] * len(after)
    return ids, marks


class Asked(NamedTuple):
    """The places of a batch whose next token is one of an answer, padded to one number for all batches."""

    rows: np.ndarray
    targets: np.ndarray
    weight: np.ndarray


def asked_of(texts: Texts, most: int) -> Asked:
    """Places, as indices of `B * S` positions."""
    row, at = np.nonzero(texts.answer)
    row, at = row[:most], at[:most]
    padded = [np.zeros(most, kind) for kind in (np.int32, np.int32, np.float32)]
    width = texts.tokens.shape[1] - 1
    for into, values in zip(
        padded, (row * width + at - 1, texts.tokens[row, at], np.ones(len(row))), strict=True
    ):
        into[: len(row)] = values
    return Asked(*padded)


def loss_of(
    weights: model.Weights, tokens: jax.Array, asked: Asked, shape: model.Shape
) -> tuple[jax.Array, jax.Array]:
    """Mean loss of the answers' tokens, and which of them are the likeliest."""
    states = model.hidden_states(weights, tokens, shape).reshape(-1, shape.embed)[asked.rows]
    logits = model.logits(weights, states)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, asked.targets)
    return (losses * asked.weight).sum() / asked.weight.sum(), logits.argmax(
        axis=-1
    ) == asked.targets


def optimiser() -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest; the rates' factor is a number of the state."""

    def made(factor: float) -> optax.GradientTransformation:
        matrices = optax.contrib.muon(RATE * factor, consistent_rms=0.2, weight_decay=0.01)
        rest = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(ADAM_RATE * factor, b2=0.98))
        kinds = lambda tree: {  # noqa: E731
            name: "rest" if value.ndim == 1 or "embed" in name else "matrix"
            for name, value in tree.items()
        }
        return optax.multi_transform({"matrix": matrices, "rest": rest}, kinds)

    return optax.inject_hyperparams(made)(factor=0.0)


@functools.partial(jax.jit, static_argnames="shape", donate_argnums=(0, 1))
def step(weights, state, tokens, asked, factor, shape):
    """One step; weights and the optimiser's state are given up."""
    (loss, right), slope = jax.value_and_grad(loss_of, has_aux=True)(weights, tokens, asked, shape)
    state.hyperparams["factor"] = factor
    change, state = optimiser().update(slope, state, weights)
    return optax.apply_updates(weights, change), state, loss, right


def accuracy(texts: Texts, right: np.ndarray, names: list[str]) -> dict[str, tuple[int, int]]:
    """Answers without a fault, and all answers, by lesson."""
    row, at = np.nonzero(texts.answer)
    row, number = row[: len(right)], texts.answer[row, at][: len(right)]
    wrong = np.unique(np.stack([row, number])[:, ~right[: len(row)]], axis=1)
    every = np.unique(np.stack([row, number]), axis=1)
    return {
        name: (
            int((texts.lesson[every[0]] == at).sum() - (texts.lesson[wrong[0]] == at).sum()),
            int((texts.lesson[every[0]] == at).sum()),
        )
        for at, name in enumerate(names)
    }


class Run:
    """A training run, as it is in its folder."""

    def __init__(self, folder: Path):
        """Begins, or goes on where the folder's state was saved."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Kept: a template that changes must not change what a row of the embedding means.
        tokens = folder / "tokenizer.json"
        if not tokens.exists():
            tokenizer_of(lessons.texts(), lessons.SMALL_WORDS).save(str(tokens))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(tokens))
        # Rounded up, so that a token more needs no other shape.
        self.shape = model.Shape(vocab=-(-self.tokenizer.get_vocab_size() // 256) * 256)
        self.weights = model.initial(self.shape, SEED)
        self.state = optimiser().init(self.weights)
        self.at: dict[str, Any] = {"step": 0, "stage": 0, "since": 0, "seconds": 0.0}
        if (folder / "state.npz").exists():
            self._restore()
        self.saved = time.monotonic()

    def _leaves(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten((self.weights, self.state))

    def save(self) -> None:
        """Whole or not at all."""
        leaves, _ = self._leaves()
        fresh = self.folder / "fresh.npz"
        np.savez(
            fresh,
            at=json.dumps(self.at),
            **{str(number): leaf for number, leaf in enumerate(leaves)},
        )
        os.replace(fresh, self.folder / "state.npz")
        self.saved = time.monotonic()

    def _restore(self) -> None:
        leaves, tree = self._leaves()
        with np.load(self.folder / "state.npz") as held:
            self.at = json.loads(str(held["at"]))
            self.weights, self.state = jax.tree.unflatten(
                tree, [jnp.asarray(held[str(n)]) for n in range(len(leaves))]
            )

    def log(self, record: dict[str, Any]) -> None:
        """One line of the log."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def train(self) -> None:
        """The stages that are left."""
        while self.at["stage"] < len(STAGES):
            self._stage(STAGES[self.at["stage"]])
            self.at.update(stage=self.at["stage"] + 1, since=0)
            self.save()

    def _stage(self, stage: Stage) -> None:
        names, most = list(stage.mix), stage.batch * stage.length // 3
        recent: list[tuple[float, dict[str, tuple[int, int]]]] = []
        while self.at["since"] < stage.most:
            begin = time.monotonic()
            # Of seed and step alone, so that a run that was ended goes on with the same texts.
            texts = texts_of(np.random.default_rng((SEED, self.at["step"])), self.tokenizer, stage)
            first, last = stage.rates
            factor = (first + (last - first) * self.at["since"] / stage.most) * min(
                1, (self.at["step"] + 1) / WARM_UP
            )
            self.weights, self.state, loss, right = step(
                self.weights,
                self.state,
                texts.tokens[:, :-1],
                asked_of(texts, most),
                np.float32(factor),
                self.shape,
            )
            recent.append((float(loss), accuracy(texts, np.asarray(right), names)))
            self.at["step"] += 1
            self.at["since"] += 1
            self.at["seconds"] += time.monotonic() - begin
            if time.monotonic() - self.saved > SAVE_SECONDS:
                self.save()
            if self.at["since"] % EVERY == 0:
                shares = self._tell(stage, recent[-EVERY:])
                if len(recent) >= EVERY and min(shares.values()) >= stage.goal:
                    return

    def _tell(
        self, stage: Stage, recent: list[tuple[float, dict[str, tuple[int, int]]]]
    ) -> dict[str, float]:
        shares = {}
        for name in stage.mix:
            right, count = (sum(each[name][part] for _, each in recent) for part in (0, 1))
            shares[name] = round(right / max(count, 1), 4)
        loss = round(float(np.mean([loss for loss, _ in recent])), 4)
        of = {
            "step": self.at["step"],
            "stage": self.at["stage"],
            "length": stage.length,
            "batch": stage.batch,
        }
        self.log({**of, "seconds": round(self.at["seconds"]), "loss": loss, **shares})
        return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where state and log of the run lie")
    parser.add_argument(
        "--export", action="store_true", help="train no further: write what it has come to"
    )
    args = parser.parse_args()
    run = Run(args.folder)
    if not args.export:
        run.train()
    export(run.weights, run.shape, args.folder / "tokenizer.json")
    write_manifest(find_filters())


if __name__ == "__main__":
    main()
