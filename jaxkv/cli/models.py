"""Options of commands with a model, and how they load it."""

from typing import Annotated, Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import Implementation
from jaxkv.cli.options import (
    ArgumentSpec,
    Count,
    Mesh,
    Name,
    Natural,
    PolicyArguments,
    parse_integer,
    pick_fields,
)
from jaxkv.loading import LanguageModel, load
from jaxkv.machine.compilation import enable_compilation_cache

Bits = Annotated[str, ArgumentSpec("BITS")]


@frozen_dataclass
class ModelOption:
    """Base class of commands with the option --model, a model's name or file, and `load_model`, which loads it.

    Attributes:
        model: a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id.
    """

    model: Name = "smollm2-135m-instruct"

    def load_model(self, **options: Any) -> LanguageModel:
        """Enable the disk cache of programs; return the `LanguageModel` of --model, by `jaxkv.load` with `options`."""
        enable_compilation_cache()
        return load(self.model, **options)


@frozen_dataclass
class ModelLoadingOptions(ModelOption):
    """Options of loading a model: its name, its dtype, and the quantisation of its weights.

    Attributes:
        dtype: float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU).
        weights: quantise linear maps to int8, half the memory of 16 bits, or int4, a third (default: dtype).
    """

    dtype: Name | None = None
    weights: Bits | None = None

    def load_model(self, **options: Any) -> LanguageModel:
        """Load the `LanguageModel` of --model with --dtype and --weights; pass keyword `options` on to `jaxkv.load`."""
        return super().load_model(dtype=self.dtype, weights=self.weights, **options)


@frozen_dataclass
class ComputeOptions(ModelLoadingOptions):
    """Options of commands that run a model: its name, dtype, weights, and the implementation of attention.

    Attributes:
        implementation: implementation of attention; auto for the fastest on the device.
    """

    implementation: Implementation = Implementation.AUTO


def _parse_slots(text: str) -> int | str:
    """Parse the number of slots: "auto", or an int of at least 1; ValueError for other text."""
    try:
        return text if text == "auto" else parse_integer(text, least=1)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


@frozen_dataclass
class EngineOptions(ComputeOptions):
    """Options of commands that create an `Engine`: slots, token limits, mesh, documents and policy.

    Attributes:
        served_model_name: name of the model in requests (default: the value of --model).
        mesh: devices to run on, such as 1x8: slots over D, kv heads over M.
        slots: number of requests answered at the same time; auto for as many as fit.
        max_prompt_tokens: maximum tokens of a prompt (default: 4096, if the model supports them).
        max_new_tokens: maximum tokens of an answer.
        max_question_tokens: maximum tokens of a question on a document; 0: no documents.
        prefill_tokens: maximum padded tokens of waiting prompts that are read together.
        documents: folder that keeps documents for the next start (default: none are kept).
    """

    served_model_name: Name | None = None
    mesh: Mesh | None = None
    slots: Annotated[int | str, ArgumentSpec("N", _parse_slots)] = "auto"
    max_prompt_tokens: Count | None = None
    max_new_tokens: Count = 512
    max_question_tokens: Natural = 256
    prefill_tokens: Count = 4096
    documents: Name | None = None
    policy: PolicyArguments

    @property
    def served_model_id(self) -> str:
        """Name of the model in requests: --served-model-name, or else the value of --model."""
        return self.served_model_name or self.model

    def build_engine_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `Engine` for slots, token limits and the attention implementation."""
        names = "slots max_prompt_tokens max_new_tokens max_question_tokens prefill_tokens implementation"
        return pick_fields(self, names)
