"""`jaxkv serve`: checks its options, loads the model, makes an engine and answers OpenAI's HTTP interface."""

import argparse
import contextlib
import itertools
import logging
import os
import threading
from typing import Any

from jaxkv._errors import require
from jaxkv.attention import named
from jaxkv.cli.extras import needing
from jaxkv.cli.models import (
    add_dtype_option,
    add_implementation_option,
    add_model_option,
    add_weights_option,
    require_model,
)
from jaxkv.cli.numbers import argument, natural, positive, real
from jaxkv.cli.policy_options import add_policy_options, policy_from
from jaxkv.cli.serving_policies import engines, further_policies
from jaxkv.cli.streams import to_stderr
from jaxkv.engine.slots import PARTS
from jaxkv.loading import LanguageModel, load
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.sharding.sizes import mesh_of

SERVE_NOTES = """\
The addresses are OpenAI's: /v1/models, /v1/completions, /v1/chat/completions; and /v1/documents, /health, /metrics,
/openapi.json. At / is a page that compresses a document, shows which of its tokens are kept, and asks about it.
SIGTERM or Ctrl-C answers the requests that are there and takes no new ones; the second one ends at once.

examples:
  64 requests at a time, if they fit, each with 1024 rows per kv head:
    jaxkv serve --model smollm2-135m-instruct --policy adakv --budget 1024 --slots auto --port 8000

  several policies over the same weights, as the models smollm2-135m-instruct and smollm2-135m-instruct:full:
    jaxkv serve --model smollm2-135m-instruct --policy adakv --budget 1024 --also full --slots 8

  then, from any of OpenAI's clients:
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}'
"""
_KEY = "JAXKV_API_KEY"


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv serve` to its parser."""
    count, seconds = argument(positive), argument(real)
    add = parser.add_argument_group("model").add_argument
    add_model_option(add)
    add_dtype_option(add)
    add_weights_option(add)
    add(
        "--served-model-name",
        metavar="NAME",
        help="the model's name in requests (default: what --model says)",
    )
    add_implementation_option(add)
    add(
        "--mesh",
        metavar="DxM",
        help="devices to run on, such as 1x8: slots over D, kv heads over M",
    )
    about = (
        "a further policy, as model NAME:POLICY; options go behind "
        "its name: 'snapkv --window 8'. Without a budget of"
    )
    about += " its own it has --policy's. May be given again"
    add("--also", action="append", metavar="POLICY", help=about)
    add = parser.add_argument_group("slots", "Each policy has its own.").add_argument
    add(
        "--slots",
        default="auto",
        metavar="N",
        help="requests answered at the same time; auto: as many as fit",
    )
    add(
        "--max-prompt-tokens",
        type=count,
        metavar="N",
        help="most tokens of a prompt (default: 4096, if the model can)",
    )
    add(
        "--max-new-tokens",
        type=count,
        default=512,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    about = "most tokens of a question on a document; 0: no documents (default: %(default)s)"
    add("--max-question-tokens", type=argument(natural), default=256, metavar="N", help=about)
    about = "folder that keeps documents for the next start, with a folder inside for each --also"
    about += " (default: they are gone at the end)"
    add("--documents", metavar="FOLDER", help=about)
    about = "most bytes of documents on the device; others wait on disk (default: half of what slots leave)"
    add("--document-bytes", type=argument(_bytes), metavar="N", help=about)
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen at; 0.0.0.0 for all (default: %(default)s)",
    )
    add(
        "--port",
        type=argument(_port),
        default=8000,
        metavar="N",
        help="0 for any free one (default: %(default)s)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send (default: {_KEY}, if it is set)",
    )
    add(
        "--queue",
        type=count,
        default=256,
        metavar="N",
        help="requests that may wait (default: %(default)s)",
    )
    about = "seconds until an answer must be complete (default: %(default)s)"
    add("--timeout", type=seconds, default=600.0, metavar="S", help=about)
    about = "most bytes of a request's body (default: %(default)s)"
    add("--max-body-bytes", type=count, default=8 << 20, metavar="N", help=about)
    add_policy_options(parser)


def _bytes(text: str) -> int:
    """Number of bytes, an int of 0 or more, parsed from text; ValueError for other text."""
    if not text.isdecimal() or len(text) > 18:
        raise ValueError("give a number of bytes")
    return int(text)


def _port(text: str) -> int:
    """TCP port, an int from 0 to 65535, parsed from text; ValueError for other text."""
    port = natural(text)
    if port > 65535:
        raise ValueError("give at most 65535")
    return port


def run_serve(options: argparse.Namespace) -> int:
    """Runs `jaxkv serve`: serves HTTP until a signal ends the process, with code 0, or 130 if it ends at once."""
    with needing("serve", "serving needs"):
        from jaxkv.serving.engine import forget_all
        from jaxkv.serving.http import Application
        from jaxkv.serving.limits import Limits
        from jaxkv.serving.server import Server, listening, many_files
    policy, slots, implementation = (
        policy_from(options),
        slots_from(options.slots),
        named(options.implementation),
    )
    name = options.served_model_name or options.model
    further = further_policies(options.also or (), policy)
    policies = {name: policy} | {f"{name}:{each}": its for each, its in further.items()}
    require_model(options.model)
    require(options.timeout > 0, "--timeout", options.timeout, "give seconds above 0")
    key = os.environ.get(_KEY) or None if options.api_key is None else options.api_key
    limits = Limits(
        api_key=key,
        body_bytes=options.max_body_bytes,
        seconds=options.timeout,
        answers=min(64, options.queue),
    )
    mesh = None if options.mesh is None else mesh_of(options.mesh)
    server, steps, total = Server(), itertools.count(1), 1 + PARTS * len(policies)
    given = _of_engines(options) | {"slots": slots, "implementation": implementation, "mesh": mesh}

    def tick(what: str) -> None:
        server.progress = {"step": next(steps), "steps": total, "doing": what}
        to_stderr("jaxkv: {step} of {steps}: {doing}".format(**server.progress))

    with contextlib.ExitStack() as stack:
        found = stack.enter_context(listening(options.host, options.port))
        host, port = found.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host

        def make() -> None:
            tick(f"loading {options.model}")
            made = engines(_loaded(options), policies, folder=options.documents, tick=tick, **given)
            models = stack.enter_context(made)
            _log_to_stderr()
            server.app = Application(models, limits=limits)
            for each, engine in models.items():
                to_stderr(
                    f"jaxkv: {each} at http://{host}:{port}/v1, {engine.stats.slots} slots, {policies[each]}"
                )
            to_stderr(f"jaxkv: a page to ask from at http://{host}:{port}/")

        many_files()
        to_stderr(f"jaxkv: http://{host}:{port} answers 503 until it is ready")
        threading.Thread(target=server.make, args=(make,), daemon=True).start()
        server.run(sockets=[found])
        if server.error is not None:
            raise server.error
        forget_all()
        # All is answered or given up, and a program that is being compiled cannot be interrupted.
        os._exit(130 if server.cut else 0)


def slots_from(text: str) -> int | str:
    """Value of --slots parsed from text: "auto", or an int of at least 1; ValueError for other text."""
    try:
        return text if text == "auto" else positive(text)
    except ValueError as error:
        raise ValueError(f"--slots={text}: {error}, or auto") from None


def _loaded(options: argparse.Namespace) -> LanguageModel:
    """Loads the model of --model as a `LanguageModel`; ValueError if it has no tokenizer."""
    enable_compilation_cache()
    params = load(options.model, dtype=options.dtype, weights=options.weights)
    require(
        params.text is not None,
        "--model",
        options.model,
        "the checkpoint has no tokenizer: answers are texts",
    )
    return params


def _of_engines(options: argparse.Namespace) -> dict[str, Any]:
    """Dict of the `Engine` arguments that are copied unchanged from the parsed options, such as token limits."""
    names = (
        "max_prompt_tokens",
        "max_new_tokens",
        "max_question_tokens",
        "queue",
        "document_bytes",
    )
    return {name: getattr(options, name) for name in names}


def _log_to_stderr() -> None:
    """Sends the log lines of `jaxkv.serving` to stderr, with times, and not also to the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("jaxkv.serving")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Other libraries give the root logger a handler of its own: each line would be there twice.
    log.propagate = False
