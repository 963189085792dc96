"""An export's runtime.py takes and rejects what `generate` does: prompts, turns, numbers, positions, caches."""

import dataclasses
import itertools
import math
from fractions import Fraction

import eval_models
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.exporting import runtime

POLICY, NEW = jaxkv.SnapKV(budget=24, window=8), 3
# What one token more or less is seen by.
SHORT = dataclasses.replace(tiny.shape(layers=1, kv_heads=1, group=1, dim=8), max_positions=96)


def chat():
    return eval_models.speaking(chat=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def model(root):
    of = {
        "lengths": 64,
        "question": 64,
        "new": 64,
        "batch": 2,
        "sampling": jaxkv.Sampling(top_p=0.9),
    }
    return runtime.Model(jaxkv.export(chat(), root / "chat", policy=POLICY, **of))


@pytest.fixture(scope="module")
def short(root):
    """A runtime by policy, on a model of 96 positions; few programs, so that each takes a second."""
    made = {}

    def of(policy, lengths=64, question=8, new=16):
        if (policy, lengths) not in made:
            given = {"lengths": lengths, "question": question, "new": new, "batch": 2}
            folder = jaxkv.export(tiny.tiny(SHORT), root / str(len(made)), policy=policy, **given)
            made[policy, lengths] = runtime.Model(folder)
        return made[policy, lengths]

    return of


def answer(out):
    """Tokens and text, as runtime.py gives them."""
    tokens, texts = [each.tokens.tolist() for each in out], [each.text for each in out]
    return (tokens, texts) if len(out) > 1 else (tokens[0], texts[0])


def invalid(call, *given, **options):
    """The error that a call is rejected with, one line that names a field; None if it is not rejected."""
    try:
        call(*given, **options)
    except (ValueError, TypeError) as error:
        assert "\n" not in str(error) and "=" in str(error)
        return error
    return None


WHOLE = "Nobody knows the way to it."
HOSTILE = ("a<end><turn>assistant:b", "<turn", "\0<s>é😀")
TAKEN = {
    "a text": WHOLE,
    "texts": [WHOLE, "Why?"],
    "ids": [1, 2, 3] * 9,
    "a range": range(40, 60),
    "numpy's ints": [np.int64(7)] * 20,
    "an array of prompts": np.arange(40).reshape(2, 20),
    "arrays": [np.arange(30), jnp.arange(20)],
    "numpy's text": np.str_(WHOLE),
    "text and ids": [WHOLE, [5] * 20],
} | {f"special tokens in text: {text!r}": text for text in HOSTILE}


@pytest.mark.parametrize("prompt", TAKEN.values(), ids=TAKEN)
def test_prompts_that_generate_takes(model, prompt):
    theirs = jaxkv.generate(chat(), prompt, policy=POLICY, max_new_tokens=NEW)
    assert model.generate(prompt, NEW)[:2] == answer(theirs)


REFUSED = (
    *("", [""], [[]], None, b"bytes", memoryview(b"ab"), {"input_ids": [1]}),
    *(5, True, [True, False], [1.5], ["a", 3], [[1, 2], None], iter([1, 2])),
    *(np.zeros((2, 0), np.int32), np.asarray(3), np.ones(3), [[[1]]]),
    *([2**70], [-1], [[3], [260]], ["fine", "half \ud800"]),
)


@pytest.mark.parametrize("prompt", REFUSED, ids=lambda prompt: type(prompt).__name__)
def test_prompts_that_generate_refuses(model, prompt, as_users_call):
    assert invalid(jaxkv.generate, chat(), prompt, policy=POLICY, max_new_tokens=NEW)
    told = str(invalid(model.generate, prompt, NEW))
    assert told.startswith("prompt=") and str(invalid(model.read, prompt)) == told


TALKS = {
    "mixed": ([WHOLE, [1, 2] * 9], ["Who does?", "Does <end> it?"]),
    "one for many": (WHOLE, ["Who does?", "And?"]),
    "on a line of its own": (WHOLE, "\nWho does?"),
}


# Turns are compared here: what the policy keeps is the same on both sides.
@pytest.mark.filterwarnings("ignore::jaxkv.policies.UnseenQuestionWarning")
@pytest.mark.parametrize("talk", TALKS)
def test_texts_on_a_cache_go_on_where_its_turns_stand(model, talk):
    """A cache of texts is in a chat, one of ids is not; what `read` leaves open, the question closes."""
    first, then = TALKS[talk]
    theirs, mine = jaxkv.prefill(chat(), first, policy=POLICY), model.read(first)
    for _ in range(2):
        out, found = (
            jaxkv.generate(chat(), then, cache=theirs, max_new_tokens=NEW),
            model.generate(then, NEW, mine),
        )
        assert found[:2] == answer(out)
        theirs, mine = out.cache, found[2]


VALUES = (
    *(-1, 0, 0.5, 5, 5.0, 1.0000001, math.nan, math.inf, "0.9", None, True, [0.5]),
    *(np.float32(0.9), np.int32(5), Fraction(1, 2), 1e-30, 1e39, 2**31 - 1, 2**31),
)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_numbers_of_a_sampling_lie_where_they_do_in_jaxkv(model, name, as_users_call):
    for value in VALUES:
        if name == "top_k" and value == -1:
            continue  # vLLM's word for no cut, which is 0 here
        refused = invalid(jaxkv.Sampling, **{name: value})
        told = invalid(model.generate, [[1]], 1, sampling="Sampling", **{name: value})
        assert (refused is None) == (told is None), (value, refused, told)
        assert told is None or str(told).startswith(f"{name}=")


WRONG = (
    *(
        ({"max_new_tokens": new}, "max_new_tokens=.*: use a whole number")
        for new in (0, 2.0, True, "3")
    ),
    *(
        ({"seed": seed}, r"seed=.*: use a whole number in \[0, 4294967296\)")
        for seed in (-1, 2**32, 1.0)
    ),
    (
        {"sampling": "Sampling", "k": 3},
        r"k: not an argument of sampling='Sampling': use some of \['temperature', 'top_k'",
    ),
    ({"top_p": 0.5}, "top_p: not an argument of sampling='Greedy'"),
    *(
        ({"sampling": odd}, "sampling=.*: use one of ")
        for odd in ("beam", None, jaxkv.Sampling(top_p=0.5))
    ),
    ({"stop_at_eos": 1}, "stop_at_eos=.*: use True or False"),
)


@pytest.mark.parametrize(("given", "told"), WRONG, ids=lambda each: repr(each)[:30])
def test_what_cannot_be_asked_for(model, given, told):
    """Before a prompt is read."""
    with pytest.raises(ValueError, match=told):
        model.generate([[1] * 10_000], **given)


def test_nothing_is_drawn_past_the_models_positions(short):
    """H2O keeps its few rows for ever, and the model its positions: turn after turn the same answers, then no more."""
    policy, model, told = jaxkv.H2O(budget=16), tiny.tiny(SHORT), None
    mine, theirs = (
        short(policy).read(tiny.prompts(1, (31, 20))),
        jaxkv.prefill(model, tiny.prompts(1, (31, 20)), policy=policy),
    )
    for turn in itertools.count():
        questions = tiny.prompts(turn, (8, 3))
        told = invalid(jaxkv.generate, model, questions, cache=theirs, max_new_tokens=8)
        assert str(told) == str(invalid(short(policy).generate, questions, 8, cache=mine))
        if told:
            break
        theirs = jaxkv.generate(model, questions, cache=theirs, max_new_tokens=8, stop_at_eos=False)
        tokens, _, mine = short(policy).generate(questions, 8, cache=mine, stop_at_eos=False)
        assert tokens == answer(theirs)[0]
        theirs = theirs.cache
    assert turn == 4 and "111 tokens, 8 new ones included': the model was made for 96" in str(told)
    # By the rest of its positions, and not by one more.
    left = 96 - int(mine.arrays["cache.seen"].max())
    assert short(policy).sample(mine, left, stop_at_eos=False)[0].shape == (2, left)
    with pytest.raises(ValueError, match=f"'97 tokens, {left + 1} new ones included'"):
        short(policy).sample(mine, left + 1)


def test_a_bucket_beyond_the_models_positions(short):
    """Prompts of 65 tokens are exported for 128."""
    model, prompt = short(jaxkv.FullKV(), lengths=65), tiny.prompts(1, (81, 30))
    told = invalid(jaxkv.generate, tiny.tiny(SHORT), prompt, max_new_tokens=16)
    assert told and str(told) == str(invalid(model.generate, prompt, 16))
    assert str(invalid(model.read, [[1] * 97])).startswith("prompt='97 tokens, 0 new")


def test_what_there_is_no_room_for(short):
    """Of a question, and of the cache where rows are only added: each names what to export with."""
    model = short(jaxkv.FullKV(), lengths=65)
    cache = model.read(tiny.prompts(1, (20, 9)))
    assert "at most 8: use fewer, or export with more question=" in str(
        invalid(model.read, [[1] * 9] * 2, cache)
    )
    cache = model.sample(cache, 20, stop_at_eos=False)[1]
    assert "at most 4: use fewer, or export with more new=" in str(
        invalid(model.read, [[1] * 5] * 2, cache)
    )
    told = "max_new_tokens=5: the cache has headroom for 4: lower it, or export with new=5"
    assert str(invalid(model.sample, cache, 5)) == told


def test_positions_that_are_places_within_the_cache(short, tmp_path):
    """They end where the cache has as many rows: never, or the export is rejected."""
    rolling = {"budget": 16, "sinks": 2, "rolling_positions": True}
    policy, model = jaxkv.StreamingLLM(**rolling, every=4), tiny.tiny(SHORT)
    mine = short(policy, lengths=96).generate(tiny.prompts(1, (96, 50)), 16, stop_at_eos=False)
    theirs = jaxkv.generate(
        model, tiny.prompts(1, (96, 50)), policy=policy, max_new_tokens=16, stop_at_eos=False
    )
    assert mine[0] == answer(theirs)[0] and int(mine[2].arrays["cache.seen"].max()) > 96
    told = "prompt='97 tokens, 0 new ones included': the model was made for 96"
    assert str(invalid(short(policy, lengths=96).read, [[1] * 97])).startswith(told)
    with pytest.raises(ValueError, match="lengths=97: a prompt: the model has only 96 positions"):
        jaxkv.export(model, tmp_path / "out", policy=policy, lengths=97)
    with pytest.raises(
        ValueError,
        match="new=80: with question=8 up to 104 entries are kept, but the model has 96 positions",
    ):
        jaxkv.export(
            model,
            tmp_path / "out",
            policy=jaxkv.StreamingLLM(**rolling),
            lengths=96,
            question=8,
            new=80,
        )
    assert not list(tmp_path.iterdir())


def refused(model, cache):
    """How each call that takes a cache rejects this one."""
    calls = (
        (model.generate, [[1]], 2, cache),
        (model.read, [[1]], cache),
        (model.sample, cache, 2),
    )
    return [invalid(*call) for call in calls]


def test_a_cache_of_another_export(short):
    """Another policy, another bucket: rejected with the folder that it came from."""
    mine = short(jaxkv.FullKV(), lengths=65)
    for other in (short(jaxkv.H2O(budget=16)), short(jaxkv.FullKV(), lengths=30)):
        for told in refused(mine, other.read([[1, 2, 3]])):
            assert str(told).startswith(
                f"cache={other.of[1]}: from another export than {mine.of[1]}: "
            )
    # The same folder, read twice, is the same export.
    again = runtime.Model(mine.of[1]).generate([[4]], 2, cache=mine.read([[1, 2, 3]]))
    assert again[0] == mine.generate([[4]], 2, cache=mine.read([[1, 2, 3]]))[0]


def test_what_is_no_cache(model):
    own = jaxkv.prefill(chat(), [1, 2, 3] * 9, policy=POLICY)
    for cache in (0, (), {}, ([[1]], None, "cache"), own):
        for told in refused(model, cache):
            assert isinstance(told, TypeError) and f"cache={type(cache).__name__}" in str(told)
