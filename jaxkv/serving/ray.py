"""Ray Serve application: replicas with one engine each, behind the router of Ray Serve.

Start it with `serve run docs/ray_serve.yaml`, whose `import_path` is `jaxkv.serving.ray:app`.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from jaxkv.policies.registry import resolve_policy
from jaxkv.serving.engine_config import EngineConfig
from jaxkv.serving.http import HttpApplication
from jaxkv.serving.limits import RequestLimits

# Requests in flight per replica: the queue of the engine rejects more, not Ray Serve.
_MOST = 10_000


class ModelSettings(BaseModel):
    """Ray Serve settings of the model, as texts or None: `model`, `dtype`, `weights`, `mesh`, as in `EngineConfig`."""

    model_config = ConfigDict(extra="forbid")

    model: str = "smollm2-135m-instruct"
    dtype: str | None = None
    weights: str | None = None
    mesh: str | None = None


class EngineSettings(BaseModel):
    """Ray Serve settings of the engine: arguments of `Engine`, by the same names."""

    slots: int | str = "auto"
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 512
    max_question_tokens: int = 256
    prefill_tokens: int = 4096
    queue: int = 256
    documents: str | None = None
    document_bytes: int | None = None


class RayServeSettings(ModelSettings, EngineSettings):
    """Settings of the Ray Serve application: the `args` of its configuration, as docs/serving.md describes them."""

    name: str | None = None
    policy: str | None = None
    policy_options: dict[str, Any] = {}
    replicas: int = Field(default=1, ge=1)
    cpus: float = 1
    gpus: float = 0
    api_key: str | None = None
    timeout: float = 600
    max_body_bytes: int = 8 << 20
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"


@serve.ingress()
class Replica:
    """Ray Serve replica: one engine behind OpenAI's HTTP interface."""

    def __init__(self, recipe: EngineConfig, name: str, limits: RequestLimits):
        """Load the model, and create its engine and the HTTP application around it."""
        self._engine = recipe.create_engine()
        self._app = HttpApplication({name: self._engine}, limits=limits)

    def __serve_build_asgi_app__(self) -> HttpApplication:
        """Return the engine's ASGI application for Ray Serve."""
        return self._app

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed; Ray Serve then starts another replica."""
        if self._engine.error is not None:
            raise RuntimeError("the engine has failed") from self._engine.error


def app(settings: RayServeSettings) -> Any:
    """Build the Ray Serve application of `settings`: an engine per replica; several without a folder: no documents."""
    options = settings.model_dump(include=set(EngineSettings.model_fields))
    options["policy"] = resolve_policy(settings.policy, options=settings.policy_options)
    # Without a shared folder, a replica knows only its own documents.
    if settings.replicas > 1 and settings.documents is None:
        options["max_question_tokens"] = 0
    of_model = settings.model_dump(include=set(ModelSettings.model_fields))
    recipe = EngineConfig(**of_model, options=options)
    limits = RequestLimits(
        api_key=settings.api_key,
        seconds=settings.timeout,
        body_bytes=settings.max_body_bytes,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        generation_config=settings.generation_config,
    )
    deployment = serve.deployment(Replica).options(
        num_replicas=settings.replicas,
        max_ongoing_requests=_MOST,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
    )
    return deployment.bind(recipe, settings.name or settings.model, limits)
