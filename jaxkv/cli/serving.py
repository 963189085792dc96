"""`jaxkv serve`: validates its options, loads the model, creates its engines and serves OpenAI's HTTP API."""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxkv._errors import require
from jaxkv.cli.models import SlotOptions
from jaxkv.cli.options import Count, Name, Word, picked, real, spelled, whole
from jaxkv.cli.outputs import to_stderr
from jaxkv.engine.slots import PARTS
from jaxkv.loading import LanguageModel
from jaxkv.policies import Policy
from jaxkv.serving import Engine
from jaxkv.serving.slot_memory import device_of, share_of_next
from jaxkv.sharding.mesh_argument import mesh_of

NOTES = """\
The endpoints are OpenAI's /v1/models, /v1/completions and /v1/chat/completions, and /v1/documents, /health, /metrics,
/openapi.json. At / is a page that compresses a document, shows its kept tokens, and answers questions on it.
SIGTERM or Ctrl-C answers the current requests and rejects new ones; the second signal stops immediately.

examples:
  as many requests at a time as fit, each with 1024 entries per kv head:
    jaxkv serve --model smollm2-135m-instruct --policy adakv --budget 1024 --slots auto --port 8000

  several policies over the same weights, as the models smollm2-135m-instruct and smollm2-135m-instruct:full:
    jaxkv serve --model smollm2-135m-instruct --policy adakv --budget 1024 --also full --slots 8

  then, from any OpenAI client:
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}'
"""
_KEY = "JAXKV_API_KEY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(SlotOptions):
    """`jaxkv serve`.

    Attributes:
        also: a further policy, served as model NAME:POLICY, with options: 'snapkv --window 8'. By default it has the
            budget of --policy. Repeat the option for several. Each policy has its own slots, and its own folder in
            --documents.
        document_bytes: maximum bytes of documents on the device; others are on disk (default: half of the rest).
        host: address to listen at; 0.0.0.0 for all interfaces.
        port: port to listen at; 0 for any free one.
        api_key: key that clients must send (default: JAXKV_API_KEY, if set).
        queue: maximum number of waiting requests.
        timeout: seconds until an answer must be complete.
        max_body_bytes: maximum bytes of the body of a request.
    """

    also: Annotated[tuple[str, ...], Word("POLICY", tuple, "append")] = ()
    document_bytes: Annotated[int, Word("N", partial(whole, least=0, most=2**60))] | None = None
    host: Name = "127.0.0.1"
    port: Annotated[int, Word("N", partial(whole, least=0, most=65535))] = 8000
    api_key: Annotated[str, Word("KEY")] | None = None
    queue: Count = 256
    timeout: Annotated[float, Word("S", real)] = 600.0
    max_body_bytes: Count = 8 << 20

    def run(self) -> None:
        """Serve HTTP until a signal ends the process, with code 0, or 130 if it stops immediately."""
        with needing("serve", "serving needs"):
            from jaxkv.serving.engine import forget_all
            from jaxkv.serving.http import Application
            from jaxkv.serving.limits import RequestLimits
            from jaxkv.serving.server import Server, listening, many_files
        policy = self.policy.policy()
        policies = {self.name: policy}
        policies |= further_policies(self.also, policy, self.name)
        limits = RequestLimits(
            api_key=os.environ.get(_KEY) or None if self.api_key is None else self.api_key,
            body_bytes=self.max_body_bytes,
            seconds=self.timeout,
            answers=min(64, self.queue),
        )
        given = picked(self, "queue document_bytes") | {"mesh": mesh_of(self.mesh)}
        server, steps, total = Server(), itertools.count(1), 1 + PARTS * len(policies)

        def tick(what: str) -> None:
            server.progress = {"step": next(steps), "steps": total, "doing": what}
            to_stderr("jaxkv: {step} of {steps}: {doing}".format(**server.progress))

        with contextlib.ExitStack() as stack:
            found = stack.enter_context(listening(self.host, self.port))
            host, port = found.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            address = f"http://{host}:{port}"

            def make() -> None:
                tick(f"loading {self.model}")
                params, options = self.loaded(), self.engine() | given
                _ = params.tokenizer  # answers are texts
                made = engines(params, policies, folder=self.documents, tick=tick, **options)
                models = stack.enter_context(made)
                _log_to_stderr()
                server.app = Application(models, limits=limits)
                for each, engine in models.items():
                    said = f"{engine.stats.slots} slots, {policies[each]}"
                    to_stderr(f"jaxkv: {each} at {address}/v1, {said}")
                to_stderr(f"jaxkv: web page at {address}/")

            many_files()
            to_stderr(f"jaxkv: {address} answers 503 during the start")
            threading.Thread(target=server.make, args=(make,), daemon=True).start()
            server.run(sockets=[found])
            if server.error is not None:
                raise server.error
            forget_all()
            # All requests have ended, and a running compilation cannot be interrupted.
            os._exit(130 if server.cut else 0)


def further_policies(given: Iterable[str], first: Policy, model: str) -> dict[str, Policy]:
    """Parse the `--also` options; return policies by model id, with the first policy's budget by default.

    An id is the model's id and the text of the option, with "-" for characters that a URL cannot hold. Raises
    ValueError for a repeated policy.
    """
    kept = first.composed.budget
    found: dict[str, Policy] = {}
    for text in given:
        for each in spelled(text, "--also"):
            name = f"{model}:{re.sub(r'[^A-Za-z0-9_.]+', '-', each.text).strip('-')}"
            require(name not in found, "--also", each.text, "repeated policy: leave one out")
            if kept is not None and each.takes_budget:
                found[name] = each.at(kept.given)
            else:
                found[name] = each.policy()
    return found


@contextlib.contextmanager
def engines(
    params: LanguageModel,
    policies: Mapping[str, Policy],
    *,
    folder: str | None,
    tick: Callable[[str], object] = lambda what: None,
    **options: Any,
) -> Iterator[dict[str, Engine]]:
    """Context manager that creates an `Engine` per policy, yields them by model id, and closes all of them.

    "auto" slots and documents of all engines share the memory. The first engine keeps its documents in `folder`, each
    other one in a subfolder named like its model id after the ":". `tick` is called with the name of each part before
    it compiles.
    """
    device, made = device_of(params), dict[str, Engine]()
    options |= {"precompile": False, "start": False}
    for policy in policies.values():
        # Validates every policy first, so that an error does not come after minutes.
        Engine(params, policy=policy, memory_share=1 / len(policies), **options).close()
    with contextlib.ExitStack() as stack:
        for at, (name, policy) in enumerate(policies.items()):
            documents = [each.documents for each in made.values()]
            promised = sum(max(0, each.most_bytes - each.nbytes) for each in documents)
            share = share_of_next(len(policies) - at, promised=promised, device=device)
            own = None if folder is None else Path(folder) / (name.rpartition(":")[2] if at else "")
            engine = Engine(params, policy=policy, documents=own, memory_share=share, **options)
            made[name] = stack.enter_context(engine)
            engine.start(tick, name)
        yield made


@contextlib.contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Context manager that turns a missing package into an ImportError that names the extra to install.

    `what` begins the message: "serving needs". A missing module of jaxkv is raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jaxkv"):
            raise
        raise ImportError(f"{what} {error.name}: pip install 'jaxkv[{extra}]'") from None


def _log_to_stderr() -> None:
    """Send the log lines of `jaxkv.serving` to stderr with times, and not to the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("jaxkv.serving")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Other libraries add a handler to the root logger, which would repeat each line.
    log.propagate = False
