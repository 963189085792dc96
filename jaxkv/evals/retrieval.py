"""2StageRetr's prompts: the task `2stageretr`, a sum whose result is looked up in a dictionary before it.

The task `visible`, on the same prompts, is the share of full attention on entries that a policy can see.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxkv._checks import settled
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.analysis.retention import sum_masked_attention
from jaxkv.attention.filters import FilterQuery, score_positions_by_row
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.prefill import iterate_layer_outputs
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.engine.session import Session
from jaxkv.engine.sparse import select_top_positions
from jaxkv.engine.tokens import SelectionBounds
from jaxkv.evals.perplexity import feed_one_token
from jaxkv.evals.question_tasks import QuestionTask, encode_sample
from jaxkv.evals.task import EvaluationTask, How, SampleOutcome, TaskSample, task
from jaxkv.generation import generate
from jaxkv.loading import LanguageModel
from jaxkv.policies.methods import FullKV
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import WHOLE, LayerReadConfig, count_attended_prompt_tokens
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.mesh import copy_to_host

COLOURS = tuple(
    "red blue green yellow purple orange pink brown black white gray gold silver cyan magenta lime teal navy "
    "maroon olive violet indigo turquoise".split()
)
SIZES = tuple(range(40, 201, 10))
_OPENING = (
    "Let's play a game. You have a dictionary and an addition equation. The keys of the dictionary are "
    "numbers. Find the value in the dictionary whose key is the result of the addition, and output it.\n"
)


@task("2stageretr")
@frozen_dataclass
class TwoStage(QuestionTask):
    """Task 2StageRetr (OmniKV, appendix A): work out a sum, look the result up in an earlier dictionary.

    Attributes:
        count: number of samples.
        sizes: numbers of entries of the dictionaries, used in turn.
        reason: True to ask for the sum first, step by step.
        new_tokens: maximum tokens of an answer.
        seed: seed of the questions.

    References:
        OmniKV, appendix A: keys are 0 to n - 1, and every sum of the equation is one of them.
    """

    count: int = 34
    sizes: tuple[int, ...] = SIZES
    reason: bool = False
    new_tokens: int = 48
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "count", "new_tokens")
        fits = min(self.sizes, default=0) >= 3
        require(fits, "sizes", self.sizes, "too small: use dictionaries of at least 3 entries")

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make `count` samples, the same for every model: a dictionary as context, a sum to work out as question."""
        rng = np.random.default_rng(self.seed)
        made = []
        asked = "Answer the corresponding color based on the addition result."
        if self.reason:
            asked = "First work out the addition step by step, then look its result up and say the corresponding color."
        for number, size in enumerate(itertools.islice(itertools.cycle(self.sizes), self.count)):
            colours = rng.choice(COLOURS, size)
            key = int(rng.integers(2, size))
            first = int(rng.integers(1, key))
            entries = ", ".join(f"{at}: {colour}" for at, colour in enumerate(colours))
            sample = TaskSample(
                id=f"{number:04d}",
                group="2stageretr",
                # The question starts with the equation, so that the compressed context is only the dictionary.
                context=_OPENING + f"The dictionary is {{{entries}}}\n",
                question=f"The equation is {first} + {key - first} = ?\n{asked}",
                answers=(str(colours[key]),),
                new_tokens=self.new_tokens,
                tags={"size": size, "key": key},
            )
            made.append(sample)
        return made

    def score(self, sample: TaskSample, prediction: str) -> float:
        """Return 1.0 if the right colour occurs in the prediction, ignoring case and also inside a word, else 0.0."""
        return float(sample.answers[0].lower() in prediction.lower())


@task("visible")
@frozen_dataclass
class VisibleAttentionTask(EvaluationTask):
    """Task: share of full attention on entries that a policy can see, on 2StageRetr's prompts; answers are not scored.

    Every policy reads the tokens that full attention samples, so that the share can be measured even for a model that
    answers wrongly.

    Attributes:
        count: number of samples, with dictionaries of all sizes.
        steps: number of answer tokens, from the first on, at which attention is measured.
        seed: seed of the questions.
    """

    asks = False

    count: int = 8
    steps: int = 16
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "count", "steps")

    def samples(self, params: LanguageModel) -> Sequence[TaskSample]:
        """Make `count` samples, prompts of 2StageRetr, with dictionary sizes spread from small to large."""
        # Small and large dictionaries, even for few samples.
        sizes = SIZES[:: max(1, len(SIZES) // self.count)]
        cases = TwoStage(count=self.count, sizes=sizes, seed=self.seed).samples(params)
        return [dataclasses.replace(case, group="visible", new_tokens=self.steps) for case in cases]

    def run(
        self, params: LanguageModel, policy: Policy, samples: Sequence[TaskSample], how: How
    ) -> list[SampleOutcome]:
        """Sample answers by full attention; return a `SampleOutcome` each: its share on what a policy sees."""
        prompts = [
            sum(encode_sample(params.tokenizer, sample, raw=how.raw), []) for sample in samples
        ]
        completions = generate(
            params, prompts, policy=FullKV(), max_new_tokens=self.steps, progress=False
        )
        out = []
        for ids, completion in zip(prompts, completions, strict=True):
            answer = completion.tokens.tolist()
            found, rows = measure_visible_attention(params, policy, ids, answer, key=how.seed)
            score = float(found.mean())
            figures = {"visible": found.tolist()}
            out.append(SampleOutcome(score=score, figures=figures, tokens=len(ids), rows=rows))
        return out


@settled
def measure_visible_attention(
    params: LanguageModel,
    policy: Policy,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    key: int = 0,
) -> tuple[Float[np.ndarray, " n"], float]:
    """Return full attention's share `[n]` on entries a policy sees, by answer token; mean prompt entries per kv head.

    Args:
        params: from `jaxkv.load`.
        policy: compression policy; one that chooses which entries to read gets full attention's queries.
        prompt: token ids.
        answer: the n token ids after the prompt.
        key: seed of a policy that uses random numbers.

    Returns:
        The share at each token of the answer, averaged over layers and query heads; and the prompt's entries kept, or
        read, per kv head and layer, on average.

    Raises:
        ValueError: for a policy that chooses pages, or evicts entries and chooses among the others; for a mesh.
    """
    config = params.config
    remedy = "use a model whose layers all attend to the whole prompt"
    require(
        not any(config.sliding_windows),
        "model",
        params.name,
        f"some layers have sliding windows: {remedy}",
    )
    require(
        params.axes is None, "mesh", "given", "attention is measured on one device: leave it out"
    )
    policy = resolve_policy_for_model(policy, config, params.filter_layers, dtype=params.dtype)
    parts = policy.build_policy_parts()
    whole = [*prompt, *answer]
    steps = len(answer)
    padded_len = round_up_to_bucket(len(whole))
    reading = parts.build_read_config(config.sliding_windows, round_up_to_bucket(len(prompt)))
    remedy = "not supported: use a policy that evicts entries, or chooses in filter layers, without pages"
    fits = not (reading.page or (reading.filters and parts.compresses_prompts))
    require(fits, "policy", type(policy).__name__, remedy)
    now = len(prompt) + np.arange(steps)
    position = np.arange(padded_len)
    below = now if reading.include_generated else np.full(steps, len(prompt))
    causal = np.tile((position <= now[:, None])[:, None], (1, config.kv_heads, 1))
    session = Session(params, policy, key=key)
    held = (
        _record_cache_masks(session, prompt, answer, padded_len)
        if parts.compresses_prompts
        else None
    )
    tokens = jnp.asarray([whole + [0] * (padded_len - len(whole))], jnp.int32)
    length = jnp.asarray([len(whole)], jnp.int32)
    chosen = dict[int, np.ndarray]()
    shares = []
    rows = []
    needs = Needs(queries=steps + reading.window - 1)
    for index, out in enumerate(
        iterate_layer_outputs(params.flat_decoder, tokens, length, needs=needs)
    ):
        seen = causal if held is None else held[:, index]
        if index in reading.filters:
            budget = int(
                count_attended_prompt_tokens(
                    parts.read, np.asarray([len(prompt)]), config.sliding_windows
                )[0]
            )
            each = zip(range(steps), now.tolist(), below.tolist(), strict=True)
            chosen[index] = np.stack(
                [_choose_filter_entries(reading, out, budget, *at) for at in each]
            )
        source = reading.sources[index]
        if source != WHOLE:
            seen = causal & (chosen[source] | (position >= below[:, None]))[:, None]
        q = out.q[..., -steps:, :]
        positions = out.q_positions[:, -steps:]
        sets = jnp.moveaxis(jnp.asarray(seen), 0, -1)[None]
        every = np.asarray(sum_masked_attention(q, out.k, positions, sets, axes=None))[0]
        shares.append(np.diagonal(every, axis1=2, axis2=3).mean(axis=(0, 1)))
        rows.append(seen[0, :, : len(prompt)].sum(axis=-1).mean())
    return np.stack(shares).astype(np.float64).mean(axis=0), float(np.mean(rows))


def _record_cache_masks(
    session: Session, prompt: Sequence[int], answer: Sequence[int], padded_len: int
) -> Bool[np.ndarray, "n L K S"]:
    """Prefill a prompt, feed its answer; return masks `[n, L, K, S]` of entries that each of n answer tokens sees."""
    masks = []
    cache = session.prefill(list(prompt), new=len(answer))
    for step, token in enumerate(answer):
        masks.append(cache.mask_kept_tokens(0, padded_len))
        masks[-1][..., len(prompt) + step] = True
        if step + 1 < len(answer):
            cache = feed_one_token(session, cache, [token], donate=True)
    return np.stack(masks)


def _choose_filter_entries(
    reading: LayerReadConfig, out: LayerOut, budget: int, step: int, now: int, below: int
) -> Bool[np.ndarray, " S"]:
    """Return the mask `[S]` of entries that a filter layer chooses for one token, with full attention's queries."""
    # The newest query first, because weights depend on age.
    window = slice(step, step + reading.window)
    q = out.q[:, :, :, window][:, :, :, ::-1]
    at = out.q_positions[:, window][:, ::-1]
    weights = jnp.asarray(reading.selector.compute_query_weights(reading.window))[None]
    k = out.k.reshape(1, -1, out.k.shape[-1])
    end = jnp.asarray([below], jnp.int32)
    scores = score_positions_by_row(FilterQuery(q=q, positions=at, weights=weights), k, end, None)
    candidates = SelectionBounds(end, jnp.asarray([budget], jnp.int32))
    found = select_top_positions(scores, candidates, reading, now=jnp.asarray([now], jnp.int32))
    mask = np.zeros(out.k.shape[2], bool)
    mask[copy_to_host(found.positions)[0, : int(found.count[0])]] = True
    return mask
