"""`jaxkv serve`: validates its options, loads the model, creates its engines and serves OpenAI's HTTP API."""

import contextlib
import hashlib
import itertools
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cli.models import EngineOptions
from jaxkv.cli.options import (
    ArgumentSpec,
    Count,
    File,
    Name,
    make_choice_parser,
    parse_finite_float,
    parse_integer,
    parse_policy_list,
    pick_fields,
)
from jaxkv.cli.outputs import read_text, write_to_stderr
from jaxkv.engine.sampling import Sampling
from jaxkv.engine.slots import PARTS
from jaxkv.loading import LanguageModel
from jaxkv.policies import Policy
from jaxkv.serving import Engine
from jaxkv.serving.prefix_cache import PREFIX_POLICIES, PrefixCacheConfig
from jaxkv.serving.slot_memory import compute_memory_share, get_model_device
from jaxkv.sharding.mesh_argument import make_mesh_from_text

NOTES = """\
The endpoints are OpenAI's /v1/models, /v1/completions, /v1/chat/completions and /v1/responses, Anthropic's
/v1/messages, vLLM's /tokenize and /detokenize, and /v1/documents, /health, /metrics, /version, /openapi.json. At / is
a page that compresses a document, shows its kept tokens, and answers questions on it.
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


@frozen_dataclass
class ServeCommand(EngineOptions):
    """The command `jaxkv serve` and its options: serve OpenAI's HTTP API for a model under policies.

    Attributes:
        also: a further policy, served as model NAME:POLICY, with options: 'snapkv --window 8'. By default it has the
            budget of --policy. Repeat the option for several. Each policy has its own slots, and its own folder in
            --documents.
        document_bytes: maximum bytes of documents on the device; others are on disk (default: half of the rest).
        prefix_cache: policies for which a prompt that continues an earlier conversation reuses its cache: auto for
            those whose choice fits a longer text, all, or none.
        prefix_bytes: maximum bytes of these caches in host memory, for each policy (default: a quarter of the rest).
        host: address to listen at; 0.0.0.0 for all interfaces.
        port: port to listen at; 0 for any free one.
        api_key: key that clients must send (default: JAXKV_API_KEY, if set).
        api_keys: text file of further keys, one per line, as NAME:KEY or KEY; lines that begin with # are comments. A
            document belongs to its key's name; only --api-key sees all documents.
        queue: maximum number of waiting requests.
        timeout: seconds until an answer must be complete.
        max_body_bytes: maximum bytes of the body of a request.
        tool_parser: format of tool calls in answers: hermes, llama3, mistral, harmony, none, or auto for that of the
            chat template.
        reasoning_parser: auto to split reasoning off answers by the chat template's markers, or none.
        generation_config: where settings of sampling come from that a request leaves out: auto for the model's
            generation_config.json, none for OpenAI's defaults.
    """

    also: Annotated[tuple[str, ...], ArgumentSpec("POLICY", tuple, "append")] = ()
    document_bytes: (
        Annotated[int, ArgumentSpec("N", partial(parse_integer, least=0, most=2**60))] | None
    ) = None
    prefix_cache: Annotated[str, ArgumentSpec("POLICIES", make_choice_parser(PREFIX_POLICIES))] = (
        "auto"
    )
    prefix_bytes: (
        Annotated[int, ArgumentSpec("N", partial(parse_integer, least=0, most=2**60))] | None
    ) = None
    host: Name = "127.0.0.1"
    port: Annotated[int, ArgumentSpec("N", partial(parse_integer, least=0, most=65535))] = 8000
    api_key: Annotated[str, ArgumentSpec("KEY")] | None = None
    api_keys: File | None = None
    queue: Count = 256
    timeout: Annotated[float, ArgumentSpec("S", parse_finite_float)] = 600.0
    max_body_bytes: Count = 8 << 20
    tool_parser: Name = "auto"
    reasoning_parser: Name = "auto"
    generation_config: Name = "auto"

    def run_command(self) -> None:
        """Serve HTTP until a signal, then end the process: code 0, or 130 if a signal stopped it immediately."""
        with explain_missing_package("serve", "serving needs"):
            from jaxkv.serving.engine import remove_temporary_files
            from jaxkv.serving.http import HttpApplication
            from jaxkv.serving.limits import RequestLimits
            from jaxkv.serving.server import Server, open_listening_socket, raise_open_file_limit
        policy = self.policy.build_policy()
        policies = {self.served_model_id: policy}
        policies |= parse_further_policies(self.also, policy, self.served_model_id)
        limits = RequestLimits(
            api_key=os.environ.get(_KEY) or None if self.api_key is None else self.api_key,
            api_keys={} if self.api_keys is None else read_api_keys(self.api_keys),
            body_bytes=self.max_body_bytes,
            seconds=self.timeout,
            answers=min(64, self.queue),
            **pick_fields(self, "tool_parser reasoning_parser generation_config"),
        )
        given = pick_fields(self, "queue document_bytes") | {
            "mesh": make_mesh_from_text(self.mesh),
            "prefix_cache": PrefixCacheConfig(
                policies=self.prefix_cache, max_bytes=self.prefix_bytes
            ),
        }
        server = Server()
        steps = itertools.count(1)
        total = 1 + PARTS * len(policies)

        def tick(what: str) -> None:
            server.progress = {"step": next(steps), "steps": total, "doing": what}
            write_to_stderr("jaxkv: {step} of {steps}: {doing}".format(**server.progress))

        with contextlib.ExitStack() as stack:
            found = stack.enter_context(open_listening_socket(self.host, self.port))
            host, port = found.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            address = f"http://{host}:{port}"

            def make() -> None:
                tick(f"loading {self.model}")
                params = self.load_model()
                options = self.build_engine_arguments() | given
                _ = params.tokenizer  # answers are texts
                if self.generation_config == "auto":
                    Sampling.of(params)  # rejects settings before the first request
                made = open_engines(params, policies, folder=self.documents, tick=tick, **options)
                models = stack.enter_context(made)
                _send_logs_to_stderr()
                server.app = HttpApplication(models, limits=limits)
                for each, engine in models.items():
                    said = f"{engine.stats.slots} slots, {policies[each]}"
                    write_to_stderr(f"jaxkv: {each} at {address}/v1, {said}")
                write_to_stderr(f"jaxkv: web page at {address}/")

            raise_open_file_limit()
            write_to_stderr(f"jaxkv: {address} answers 503 during the start")
            threading.Thread(target=server.run_startup, args=(make,), daemon=True).start()
            server.run(sockets=[found])
            if server.error is not None:
                raise server.error
            remove_temporary_files()
            # All requests have ended, and a running compilation cannot be interrupted.
            os._exit(130 if server.cut else 0)


def read_api_keys(name: str) -> dict[str, str]:
    """Read a file of API keys, one per line; return each key's public name: the text before ":", else a hash.

    Warns about a file that other users can read. Raises ValueError without keys or for a name without one, OSError for
    an unreadable file.
    """
    found = dict[str, str]()
    for number, line in enumerate(read_text(name, "--api-keys").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        client, _, key = (part.strip() for part in line.rpartition(":"))
        require(bool(key), "--api-keys", f"line {number}", "no key: write NAME:KEY or KEY")
        found[key] = client or hashlib.sha256(key.encode()).hexdigest()[:8]
    require(bool(found), "--api-keys", name, "no key: put one on each line")
    if name != "-" and os.stat(os.path.expanduser(name)).st_mode & 0o044:
        warnings.warn(
            f"--api-keys={name}: other users can read it: run chmod 600 on it", stacklevel=2
        )
    return found


def parse_further_policies(given: Iterable[str], first: Policy, model: str) -> dict[str, Policy]:
    """Parse the `--also` options; return policies by model id, by default with the first policy's budget.

    An id is the model's id and the text of the option, with "-" for characters that a URL cannot hold. Raises
    ValueError for a repeated policy.
    """
    kept = first.composed.budget
    found: dict[str, Policy] = {}
    for text in given:
        for each in parse_policy_list(text, "--also"):
            name = f"{model}:{re.sub(r'[^A-Za-z0-9_.]+', '-', each.text).strip('-')}"
            require(name not in found, "--also", each.text, "repeated policy: leave one out")
            if kept is not None and each.has_unset_budget:
                found[name] = each.build_with_budget(kept.field_value)
            else:
                found[name] = each.build_policy()
    return found


@contextlib.contextmanager
def open_engines(
    params: LanguageModel,
    policies: Mapping[str, Policy],
    *,
    folder: str | None,
    tick: Callable[[str], object] = lambda what: None,
    **options: Any,
) -> Iterator[dict[str, Engine]]:
    """Context manager that creates and starts an `Engine` per policy, yields them by model id, and closes them.

    "auto" slots and documents of all engines share the memory. The first engine keeps its documents in `folder`, each
    other one in a subfolder named like its model id after the ":". `tick` is called with the name of each part before
    it compiles.
    """
    device = get_model_device(params)
    made = dict[str, Engine]()
    options |= {"precompile": False, "start": False}
    for policy in policies.values():
        # Validates every policy first, so that an error does not come after minutes.
        Engine(params, policy=policy, memory_share=1 / len(policies), **options).close()
    with contextlib.ExitStack() as stack:
        for at, (name, policy) in enumerate(policies.items()):
            documents = [each.documents for each in made.values()]
            promised = sum(max(0, each.most_bytes - each.device_bytes) for each in documents)
            share = compute_memory_share(len(policies) - at, promised=promised, device=device)
            own = None if folder is None else Path(folder) / (name.rpartition(":")[2] if at else "")
            engine = Engine(params, policy=policy, documents=own, memory_share=share, **options)
            made[name] = stack.enter_context(engine)
            engine.start(tick, name)
        yield made


@contextlib.contextmanager
def explain_missing_package(extra: str, what: str) -> Iterator[None]:
    """Context manager that turns a missing package into an ImportError that names the extra to install.

    `what` begins the message: "serving needs". A missing module of jaxkv is raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jaxkv"):
            raise
        raise ImportError(f"{what} {error.name}: pip install 'jaxkv[{extra}]'") from None


def _send_logs_to_stderr() -> None:
    """Configure the logger `jaxkv.serving` to write lines with times to stderr, and not to the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("jaxkv.serving")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Other libraries add a handler to the root logger, which would repeat each line.
    log.propagate = False
