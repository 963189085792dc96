"""The task `visible`: the share of full attention on rows that a policy can see, at each token of an answer."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.analysis.recall import paid
from jaxkv.attention.filters import Asking, by_row
from jaxkv.engine.lengths import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.engine.session import Session
from jaxkv.engine.sparse import choose
from jaxkv.engine.tokens import Choosable
from jaxkv.evals.asking import ids_of
from jaxkv.evals.perplexity import feed
from jaxkv.evals.retrieval import SIZES, TwoStage
from jaxkv.evals.task import How, Outcome, Sample, Task, task
from jaxkv.generation import generate
from jaxkv.loading import LanguageModel
from jaxkv.policies.fitting import policy_for
from jaxkv.policies.methods import FullKV
from jaxkv.policies.policy import Method
from jaxkv.policies.reading import WHOLE, Reading, tokens_read
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.mesh import host


@task("visible")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visible(Task):
    """Task on 2StageRetr's prompts: share of full attention's probability on rows that a policy can see.

    The tokens that full attention draws are fed to every policy, so that the share can be measured even with a model
    that answers wrongly.

    Attributes:
        count: number of samples, with dictionaries of all sizes.
        steps: number of answer tokens, from the first on, at which attention is measured.
        seed: seed of the questions.
    """

    asks: ClassVar[bool] = False

    count: int = 8
    steps: int = 16
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.require_least(1, "count", "steps")

    def samples(self, params: LanguageModel) -> Sequence[Sample]:
        """Makes a list of `count` samples, prompts of 2StageRetr, with dictionary sizes spread from small to large."""
        # Small dictionaries and large ones, however few there are.
        few = min(self.count, len(SIZES))
        spread = tuple(SIZES[at * len(SIZES) // few] for at in range(few))
        cases = TwoStage(count=self.count, sizes=spread, seed=self.seed).samples(params)
        return [dataclasses.replace(case, group="visible", new_tokens=self.steps) for case in cases]

    def run(
        self, params: LanguageModel, policy: Method, samples: Sequence[Sample], how: How
    ) -> list[Outcome]:
        """One `Outcome` per sample: full attention's share on rows that the policy can see, mean and by token."""
        prompts = [sum(ids_of(params.text, sample, raw=how.raw), []) for sample in samples]
        drawn = generate(
            params, prompts, policy=FullKV(), max_new_tokens=self.steps, progress=False
        ).tokens
        out = []
        for ids, tokens in zip(prompts, drawn, strict=True):
            figures, rows = visible_attention(
                params, policy, ids, np.asarray(tokens).tolist(), key=how.seed
            )
            score = float(figures.mean())
            out.append(
                Outcome(
                    score=score, figures={"visible": figures.tolist()}, tokens=len(ids), rows=rows
                )
            )
        return out


@settled
def visible_attention(
    params: LanguageModel,
    policy: Method,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    key: int = 0,
) -> tuple[Float[np.ndarray, " n"], float]:
    """Array of full attention's share on rows that a policy can see, per answer token, and mean rows kept (or read).

    Args:
        params: from `jaxkv.load`.
        policy: the compression; one that chooses which rows it reads is given full attention's queries.
        prompt: token ids.
        answer: the n token ids that follow.
        key: seed of a policy that draws.

    Returns:
        The share at each token of the answer, averaged over layers and query heads; and the prompt's rows kept, or
        read, per kv head and layer, averaged.

    Raises:
        ValueError: for no tokens; for a policy that chooses pages, or drops rows and chooses among the others; on a
            mesh.
    """
    for name, ids in (("prompt", prompt), ("answer", answer)):
        require(len(ids) >= 1, name, ids, "give at least 1 token")
    remedy = (
        "some layers have windows: this looks at models whose layers all attend to the whole prompt"
    )
    require(not any(params.config.windows), "model", params.name, remedy)
    require(params.axes is None, "mesh", "given", "attention is measured on one device")
    policy = policy_for(policy, params.config, params.filter_layers, dtype=params.dtype)
    whole, steps = [*prompt, *answer], len(answer)
    slots = bucket(len(whole))
    tokens = jnp.asarray([whole + [0] * (slots - len(whole))], jnp.int32)
    choice = _choice(params, policy, len(prompt), steps, slots)
    masks = np.empty(0) if choice else _held(params, policy, prompt, answer, slots, key)
    needs = Needs(queries=steps if choice is None else steps + choice.reading.window - 1)
    shares, rows = [], []
    length = jnp.asarray([len(whole)], jnp.int32)
    for index, out in enumerate(read_layers(params.flat, tokens, length, needs=needs)):
        seen = choice.layer(index, out) if choice else masks[:, index]
        q, positions = out.q[..., -steps:, :], out.q_positions[:, -steps:]
        sets = jnp.moveaxis(jnp.asarray(seen), 0, -1)[None]
        every = np.asarray(paid(q, out.k, positions, sets, axes=None))[0]
        shares.append(np.diagonal(every, axis1=2, axis2=3).mean(axis=(0, 1)))
        rows.append(seen[0, :, : len(prompt)].sum(axis=-1).mean())
    return np.stack(shares).astype(np.float64).mean(axis=0), float(np.mean(rows))


def _held(
    params: LanguageModel,
    policy: Method,
    prompt: Sequence[int],
    answer: Sequence[int],
    slots: int,
    key: int,
) -> Bool[np.ndarray, "n L K S"]:
    """Runs prompt and answer under a policy; mask [n, L, K, S] of rows in the cache at each of n answer tokens."""
    config = params.config
    now, everything = len(prompt) + np.arange(len(answer)), not policy.parts().drops
    seen = np.arange(slots) <= now[:, None] if everything else np.arange(slots) == now[:, None]
    masks = np.tile(seen[:, None, None], (1, config.layers, config.kv_heads, 1))
    if everything:
        return masks
    session = Session(params, policy, key=key)
    cache = session.prefill(list(prompt), new=len(answer))
    for step, token in enumerate(answer):
        masks[step] |= cache.holds(0, slots)
        if step + 1 < len(answer):
            cache = feed(session, cache, [token], donate=True)
    return masks


def _choice(
    params: LanguageModel, policy: Method, prompt: int, steps: int, slots: int
) -> "_Choice | None":
    """`_Choice`, which computes filter layers' masks; None for a policy without such; ValueError if not measurable."""
    parts, windows = policy.parts(), params.config.windows
    reading, name = parts.reading(windows, bucket(prompt)), type(policy).__name__
    if not reading.chooses:
        return None
    fits = not (reading.page or parts.drops)
    remedy = "give a policy that drops rows, or chooses in filter layers, without pages"
    require(fits, "policy", name, remedy)
    budget = int(tokens_read(parts.read, np.asarray([prompt]), windows)[0])
    return _Choice(reading=reading, prompt=prompt, steps=steps, budget=budget, slots=slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
    """Computes which rows filter layers choose by full attention's queries, and keeps these masks for later layers."""

    reading: Reading
    prompt: int
    steps: int
    budget: int
    slots: int
    masks: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def layer(self, index: int, out: LayerOut) -> Bool[np.ndarray, "n K S"]:
        """Mask [n, K, S] of the rows a layer sees at each of n answer tokens; stores a filter layer's choice."""
        now, position = self.prompt + np.arange(self.steps)[:, None], np.arange(self.slots)
        if index in self.reading.filters:
            self.masks[index] = np.stack([self._choose(out, step) for step in range(self.steps)])
        source = self.reading.sources[index]
        seen = position <= now
        if source != WHOLE:
            behind = now if self.reading.include_generated else self.prompt
            seen = seen & (self.masks[source] | (position >= behind))
        return np.repeat(seen[:, None], out.k.shape[1], axis=1)

    def _choose(self, out: LayerOut, step: int) -> Bool[np.ndarray, " S"]:
        """Mask [S] of the rows that a filter layer chooses for the answer token of one step."""
        reading, now = self.reading, self.prompt + step
        # The newest query first, as weights go by age.
        window = slice(step, step + reading.window)
        q, at = out.q[:, :, :, window][:, :, :, ::-1], out.q_positions[:, window][:, ::-1]
        weights = jnp.asarray(reading.selector.weights(reading.window))[None]
        k = out.k.reshape(1, -1, out.k.shape[-1])
        below = jnp.asarray([now if reading.include_generated else self.prompt], jnp.int32)
        scores = by_row(Asking(q=q, positions=at, weights=weights), k, below, None)
        candidates = Choosable(below, jnp.asarray([self.budget], jnp.int32))
        found = choose(scores, candidates, reading, now=jnp.asarray([now], jnp.int32))
        mask = np.zeros(self.slots, bool)
        mask[host(found.positions)[0, : int(found.count[0])]] = True
        return mask
