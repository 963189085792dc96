"""What `jaxkv generate` does: checks all it is asked for, then loads the model, answers, prints and writes."""

import argparse
import dataclasses
import json
import os
import re
import sys
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv._errors import require
from jaxkv.attention import Implementation, named
from jaxkv.cli.files import Target, read_text
from jaxkv.cli.numbers import argument, real, seed, whole
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.streams import Unwritten, stdout_is_closed, to_stderr, to_stdout
from jaxkv.compilation import enable_compilation_cache
from jaxkv.generation import generate
from jaxkv.loading import load
from jaxkv.policies import Method
from jaxkv.results import Generation
from jaxkv.sampling import Greedy, MinP, Sampling, Temperature, TopK, TopP

_OUTPUT = "also write that JSON object to a file, whole or not at all; a FIFO or device is written to, not replaced"


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options.

    Args:
        parser: the subcommand's.
    """
    _add_prompt_options(parser)
    _add_drawing_options(parser)
    add_policy_options(parser)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and prompt").add_argument
    known = "a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id (default: %(default)s)"
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help=known)
    add("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")
    computing = "what computes attention: auto, xla, pallas, cudnn or mosaic (default: %(default)s)"
    add("--implementation", default=Implementation.AUTO.value, help=computing)
    add("--prompt", metavar="TEXT", help="the prompt itself")
    add("--prompt-file", metavar="FILE", help="a UTF-8 text file with the prompt, 64 MiB at most; - for stdin")
    add("--question", metavar="TEXT", help="what to ask about it; follows after a blank line")
    add("--raw", action="store_true", help="plain text: no chat template")


def _add_drawing_options(parser: argparse.ArgumentParser) -> None:
    share, count = argument(real), argument(whole, least=1)
    group = parser.add_argument_group("drawing tokens")
    add = group.add_argument
    add("--max-new-tokens", type=count, default=128, metavar="N", help="(default: %(default)s)")
    add("--stop", action="extend", nargs="+", metavar="S", help="strings that end it")
    add("--temperature", type=share, metavar="T", help="draw at random (default: the likeliest token)")
    cut = group.add_mutually_exclusive_group()
    cut.add_argument("--top-k", type=count, metavar="K", help="among the K likeliest")
    cut.add_argument("--top-p", type=share, metavar="P", help="among the likeliest that hold probability P")
    cut.add_argument("--min-p", type=share, metavar="P", help="among those at least P times as likely as the likeliest")
    add("--seed", type=argument(seed), default=0, metavar="N", help="of random draws (default: %(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object on stdout instead of the text")
    add("--output", metavar="FILE", help=_OUTPUT)
    add("--no-stream", action="store_true", help="print the text when it is complete")


def _sampling(options: argparse.Namespace) -> Sampling:
    heat = options.temperature
    require(heat is None or heat > 0, "--temperature", heat, "give a positive number; leave it out for the likeliest")
    given: dict[str, Any] = {} if heat is None else {"temperature": heat}
    for cut, name, value in ((TopK, "k", options.top_k), (TopP, "p", options.top_p), (MinP, "p", options.min_p)):
        if value is not None:
            return cut(**given, **{name: value})
    return Temperature(**given) if given else Greedy()


def _prompt(options: argparse.Namespace) -> str:
    for flag in ("prompt", "question", "stop"):
        given = getattr(options, flag) or ()
        for text in [given] if isinstance(given, str) else given:
            # Bytes that are not UTF-8 come from the shell as lone surrogates.
            require(not re.search("[\ud800-\udfff]", text), f"--{flag}", text, "not UTF-8 text")
    file = None if options.prompt_file is None else read_text(options.prompt_file, "--prompt-file").strip()
    prompt = "\n\n".join(filter(None, (file, options.prompt, options.question)))
    require(bool(prompt), "prompt", None, "give --prompt TEXT, --prompt-file FILE or --question TEXT")
    return prompt


def require_model(name: str) -> None:
    """Refuses what is no name of a model, before it is looked for.

    Args:
        name: of `--model`.

    Raises:
        ValueError: naming the remedy.
    """
    require(bool(name.strip()), "--model", name, "give a name from `jaxkv models`, a folder, a .gguf file or a hub id")
    home = name.startswith("~") and os.path.expanduser(name) == name
    require(not home, "--model", name, "there is no such home folder; a file of that name is ./" + name)


def random_key(number: int) -> PRNGKeyArray:
    """The key of a seed: jax.random.key's for 32 bits; of longer ones JAX would drop the rest.

    Args:
        number: 64 bits.

    Returns:
        The key.
    """
    if -(2**31) <= number < 2**32:
        return jax.random.key(number)
    low, high = np.uint32(number % 2**32), np.uint32(number // 2**32 % 2**32)
    return jax.random.fold_in(jax.random.key(low), high)


def run_generate(options: argparse.Namespace) -> int:
    """Answers the prompt.

    Args:
        options: of `add_generate_options`.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: for options that cannot be honoured, before the model is fetched and loaded.
        OSError: where the answer could not be written to its file; it is then on stdout, or else on stderr.
        Unwritten: where stdout took no more; the file is written nonetheless.
    """
    policy, sampling, implementation = policy_from(options), _sampling(options), named(options.implementation)
    require(all(options.stop or ()), "--stop", "", "a stop string has at least one character")
    require_model(options.model)
    target = None
    if options.output is None:
        require(not stdout_is_closed(), "stdout", "closed", "there is nowhere to answer; give --output FILE")
    else:
        target = Target(flag="--output", name=options.output)
        target.check({"--prompt-file": options.prompt_file or "", "--model": options.model})
    prompt = _prompt(options)  # last: stdin or a FIFO may keep us waiting
    enable_compilation_cache()
    model = load(options.model, dtype=options.dtype)
    streams = sys.stdout.isatty() and not options.json and not options.no_stream
    answered = generate(
        model,
        prompt,
        policy=policy,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop or (),
        key=random_key(options.seed),
        raw=options.raw,
        stream=streams,
        implementation=implementation,
        # A bar on stderr and text on stdout would write over each other on one terminal.
        progress=False if streams else None,
    )
    on = target is not None
    result, lost = (answered, None) if isinstance(answered, Generation) else _stream(answered, go_on=on)
    record = _record(options, policy, sampling, result)
    answer = _answer(record, result, as_json=options.json)
    if not streams and not stdout_is_closed():
        # Before the file: where that is a FIFO, it waits for its reader with the answer on the screen.
        lost = _printed(answer)
    if target is not None:
        _write(target, _as_json(record, "utf-8", indent=2) + "\n", answer, on_stdout=lost is None)
    if not options.json:
        _print_stats(result)
    if lost is not None:
        raise lost
    return 0


def _answer(record: dict[str, Any], result: Generation, *, as_json: bool) -> str:
    if as_json:
        return _as_json(record, getattr(sys.stdout, "encoding", None) or "utf-8")
    return result.text if isinstance(result.text, str) else " ".join(map(str, record["tokens"]))


def _stream(pieces: Any, *, go_on: bool) -> tuple[Generation, Unwritten | None]:
    """Prints text as it comes; where stdout fails, goes on for the file's sake, or raises."""
    lost = None
    for piece in pieces:
        lost = lost or _printed(piece, end="")
        if lost is not None and not go_on:
            raise lost
    return pieces.result, lost or _printed("")


def _printed(text: str, *, end: str = "\n") -> Unwritten | None:
    try:
        to_stdout(text, end=end)
    except Unwritten as lost:
        return lost
    return None


def _write(target: Target, text: str, answer: str, *, on_stdout: bool) -> None:
    try:
        target.write(text.encode())
    except (OSError, ValueError) as error:
        on_stdout = on_stdout and not stdout_is_closed()
        if not on_stdout:
            to_stderr(answer)
        raise OSError(f"{error}; the answer is on {'stdout' if on_stdout else 'stderr'}") from error


def _as_json(record: dict[str, Any], encoding: str, indent: int | None = None) -> str:
    """JSON with its letters as they are, where the encoding has them all."""
    text = json.dumps(record, indent=indent, ensure_ascii=False)
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return json.dumps(record, indent=indent)
    return text


def _record(options: argparse.Namespace, policy: Method, sampling: Sampling, result: Generation) -> dict[str, Any]:
    stats = dataclasses.asdict(result.stats)
    stats["decode_tokens_per_second"] = result.stats.decode_tokens_per_second
    return {
        "model": options.model,
        "policy": repr(policy),
        "sampling": repr(sampling),
        "text": result.text,
        "tokens": result.tokens.tolist() if not isinstance(result.tokens, list) else [],
        "stats": stats,
    }


def _print_stats(result: Generation) -> None:
    stats = result.stats
    lines = [
        f"prompt   {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s",
        f"answer   {stats.new_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"compile  {stats.compile_seconds:.2f} s",
        f"cache    {stats.full_bytes / 1e6:.2f} MB full, {stats.cache_bytes / 1e6:.2f} MB kept "
        f"({stats.kept:.1f} rows per kv head; {stats.slack_bytes / 1e6:.2f} MB unused)",
    ]
    if stats.filter_layers:
        lines.append(f"filters  layers {', '.join(map(str, stats.filter_layers))} choose what others read")
    if stats.host_bytes:
        sent = f"{stats.transfers_per_step:.0f} transfers and {stats.transferred_bytes_per_step / 1e6:.3f} MB a token"
        lines.append(f"host     {stats.host_bytes / 1e6:.2f} MB there; {sent}")
    to_stderr("\n".join(lines))
