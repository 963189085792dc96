"""Arguments of sampling by other libraries' names, and kvpress' compression ratio, which is another number."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from jaxkv._checks import flag, real, whole
from jaxkv._errors import require
from jaxkv._values import brief, shortened
from jaxkv.policies.words import share_kept
from jaxkv.sampling import Greedy, MinP, Sampling, Temperature, TopK, TopP

P = ParamSpec("P")
R = TypeVar("R")

# Arguments of sampling that Hugging Face, OpenAI and vLLM share; of cuts, the checks and the values that cut nothing.
_CUTS: dict[str, tuple[Callable[[Any], float], tuple[int, ...]]] = {
    "top_k": (
        lambda given: whole("top_k", given, "give a whole number, 0 or -1 for no cut", least=-1),
        (0, -1),
    ),
    "top_p": (
        lambda given: real("top_p", given, "give a probability in (0, 1]", high=1, open_low=True),
        (1,),
    ),
    "min_p": (lambda given: real("min_p", given, "give a share in [0, 1]", high=1), (0,)),
}
_SAMPLING = ("temperature", "do_sample", *_CUTS)


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
    heat = (
        0.0
        if temperature is None
        else real("temperature", temperature, "give a number of 0 or more")
    )
    drawn = heat > 0 if do_sample is None else flag("do_sample", do_sample)
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    cuts: dict[str, Any] = {
        name: _CUTS[name][0](value) for name, value in given.items() if value is not None
    }
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
    """Decorator that takes other libraries' arguments of sampling; TypeError, with ours, for kvpress' ratio."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def taken(*args: Any, **options: Any) -> Any:
        if "compression_ratio" in options:
            kept = share_kept(options["compression_ratio"])
            raise TypeError(
                f"compression_ratio: it is the policy's. Give policy=SnapKV({kept}), the share that is kept."
            )
        if "sampling" in known:
            options = _with_sampler(options)
        return call(*args, **options)

    return cast(Callable[P, R], taken)


def _with_sampler(options: dict[str, Any]) -> dict[str, Any]:
    """Options with `sampling` and `key` instead of other libraries' arguments; TypeError where they contradict."""
    # None is these libraries' default: it says nothing of sampling.
    given = {name: options.pop(name) for name in _SAMPLING if name in options}
    given = {name: value for name, value in given.items() if value is not None}
    if "seed" in options:
        _require_once("key", "seed", options)
        options["key"] = options.pop("seed")
    if not given:
        return options
    name, value = next(iter(given.items()))
    _require_once("sampling", name, options)
    if not given.keys() & {"temperature", "do_sample"}:
        remedy = (
            "it is not said whether tokens are drawn at random: give temperature=, too, and key=0"
        )
        raise TypeError(f"{name}={shortened(brief(value))}: {remedy}")
    return options | {"sampling": sampler_of(**given)}


def _require_once(mine: str, other: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError if an argument is given by our name, too."""
    if options.get(mine) is not None:
        raise TypeError(f"{other}: {mine}= says it already. Give one of them.")
