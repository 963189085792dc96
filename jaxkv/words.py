"""Arguments of `load`, `generate` and others by other libraries' names: taken if certain in meaning, else refused."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from jaxkv._checks import flag, real, whole
from jaxkv._errors import require
from jaxkv._values import brief, shortened
from jaxkv.cache import KVCache
from jaxkv.policies.policy import Method
from jaxkv.policies.words import share_kept
from jaxkv.sampling import Greedy, MinP, Sampling, Temperature, TopK, TopP

P = ParamSpec("P")
R = TypeVar("R")

# Other libraries' names of an argument that takes the same values.
_SAME = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "seed": "key",
    "prompts": "prompt",
    "messages": "prompt",
}
# Arguments of sampling that Hugging Face, OpenAI and vLLM share; of cuts, the checks and the values that cut nothing.
_CUTS: dict[str, tuple[Callable[[Any], float], tuple[int, ...]]] = {
    "top_k": (lambda given: whole("top_k", given, "give a whole number, 0 or -1 for no cut", least=-1), (0, -1)),
    "top_p": (lambda given: real("top_p", given, "give a probability in (0, 1]", high=1, open_low=True), (1,)),
    "min_p": (lambda given: real("min_p", given, "give a share in [0, 1]", high=1), (0,)),
}
_SAMPLING = ("temperature", "do_sample", *_CUTS)
_PENALTY = "there are no penalties: sampling= takes any function of logits and random keys"
_ASK = "cache = jaxkv.prefill(params, document, policy=...); jaxkv.generate(params, question, cache=cache)"
_REFUSED = {
    "max_length": "it counts the prompt's tokens as well: give max_new_tokens=, the number of tokens to draw",
    "min_new_tokens": "give stop_at_eos=False, which draws max_new_tokens",
    "min_tokens": "give stop_at_eos=False, which draws max_new_tokens",
    "ignore_eos": "give stop_at_eos=False, which draws max_new_tokens",
    "eos_token_id": "the model's config names these: give stop= for texts, or stop_at_eos=False",
    "n": "give the prompt as often as it is to be answered: [prompt] * n",
    "num_return_sequences": "give the prompt as often as it is to be answered: [prompt] * n",
    "num_beams": "there is no beam search: leave it out",
    "repetition_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "sampling_params": "give its fields: max_new_tokens=, sampling=, stop=, key=",
    "generation_config": "give its fields: max_new_tokens=, sampling=, stop=, key=",
    "streamer": "give stream=True, and iterate over what is returned",
    "input_ids": "give prompt=, a list of ids for each prompt, without padding",
    "attention_mask": "prompts have no padding: give prompt=, a list of ids for each",
    "past_key_values": "give cache=, which jaxkv.prefill or an earlier generate returned",
    "question": _ASK,
    "context": _ASK,
    "press": "give policy=, SnapKV(budget=0.5) say",
    "window": "it is the policy's: give policy=SnapKV(window=...)",
    "model": "give what jaxkv.load returns as params, the first argument",
    "tokenizer": "params brings its own: leave it out",
    "device": "params lies on it; give mesh= for several",
    "dtype": "give it to jaxkv.load",
    "torch_dtype": 'it is called dtype here: jaxkv.load(name, dtype="bfloat16")',
    "device_map": "give mesh= to jaxkv.load for several devices; one is JAX's default device",
    "attn_implementation": "give implementation= to generate or prefill",
    "trust_remote_code": "no code of a checkpoint's is run: leave it out",
    "quantization_config": 'give weights="int8" or "int4" to jaxkv.load',
    "quantization": 'give weights="int8" or "int4" to jaxkv.load',
    "load_in_8bit": 'give weights="int8" to jaxkv.load',
    "load_in_4bit": 'give weights="int4" to jaxkv.load',
    "max_model_len": "give max_positions= to jaxkv.load",
    "revision": "give the folder of a downloaded snapshot",
}


def sampler_of(
    *,
    temperature: Any = None,
    do_sample: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
) -> Sampling:
    """Sampler that other libraries' sampling arguments mean, `Greedy` without randomness; ValueError for two cuts.

    Without `do_sample`, tokens are drawn at random if there is a temperature above 0. More than one cut is refused.
    """
    heat = 0.0 if temperature is None else real("temperature", temperature, "give a number of 0 or more")
    drawn = heat > 0 if do_sample is None else flag("do_sample", do_sample)
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    cuts: dict[str, Any] = {name: _CUTS[name][0](value) for name, value in given.items() if value is not None}
    if not drawn or (heat == 0 and temperature is not None):
        return Greedy()
    cuts = {name: value for name, value in cuts.items() if value not in _CUTS[name][1]}
    require(len(cuts) < 2, "sampling", cuts, "one cut at a time: give one of them")
    heat = heat or 1.0
    if "top_k" in cuts:
        return TopK(k=cuts["top_k"], temperature=heat)
    if "top_p" in cuts:
        return TopP(p=cuts["top_p"], temperature=heat)
    return MinP(p=cuts["min_p"], temperature=heat) if cuts else Temperature(temperature=heat)


def by_other_names(call: Callable[P, R]) -> Callable[P, R]:
    """Decorator that translates arguments given by other libraries' names; TypeError, with the remedy, for others."""
    parameters = inspect.signature(call).parameters
    known = [name for name in parameters if name != "self"]
    places = [name for name, given in parameters.items() if given.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = [name for name in known if name not in places]
    title = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def taken(*args: Any, **options: Any) -> Any:
        if len(args) > len(places):
            extra = args[len(places)]
            name = {Method: "policy", KVCache: "cache", int: "max_new_tokens", np.integer: "max_new_tokens"}
            mine = next((name[kind] for kind in name if isinstance(extra, kind) and name[kind] in known), named[0])
            before = ", ".join(place for place in places if place != "self")
            raise TypeError(f"{shortened(brief(extra))}: give it by its name: {title}({before}, {mine}=...)")
        if not options.keys() <= set(known):
            options = _translated(title, options, known)
        return call(*args, **options)

    return cast(Callable[P, R], taken)


def _translated(call: str, options: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Options under the names in `known`, translated from other libraries' names; TypeError for untranslatable ones."""
    made = {name: value for name, value in options.items() if name in known}
    # None is these libraries' default: it says nothing of sampling.
    others = {name: value for name, value in options.items() if name not in known}
    others = {name: value for name, value in others.items() if value is not None or name not in _SAMPLING}
    drawing = {name: value for name, value in others.items() if name in _SAMPLING}
    for name, value in others.items():
        mine = "sampling" if name in drawing else _SAME.get(name)
        if mine is None:
            raise _unknown(call, name, value, known)
        if mine not in known:
            raise TypeError(f"{name}={shortened(brief(value))}: {call} draws no tokens: give it to generate")
        if mine in made:
            raise TypeError(f"{name}={shortened(brief(value))}: {mine}= says it already: give one of them")
        if name not in drawing:
            made[mine] = value
    if drawing:
        if not drawing.keys() & {"temperature", "do_sample"}:
            name, value = next(iter(drawing.items()))
            remedy = "it is not said whether tokens are drawn at random: give temperature=, too, and key=0"
            raise TypeError(f"{name}={value!r}: {remedy}")
        made["sampling"] = sampler_of(**drawing)
    return made


def _unknown(call: str, name: str, value: Any, known: list[str]) -> TypeError:
    """Returns the TypeError for an argument that a call does not have, with a text that says what to write instead."""
    if name == "compression_ratio":
        remedy = f"it is the policy's: give policy=SnapKV({share_kept(value)}), the share that is kept"
    elif name == "budget":
        remedy = f"it is the policy's: give policy=SnapKV(budget={value!r})"
    elif name in _REFUSED:
        remedy = _REFUSED[name]
    else:
        near = difflib.get_close_matches(name, known, n=2)
        remedy = f"{call} has no such argument; "
        remedy += f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return TypeError(f"{name}={shortened(brief(value))}: {remedy}")
