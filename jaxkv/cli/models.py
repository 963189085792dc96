"""Options of commands with a model, and how they load it."""

import dataclasses
from typing import Annotated, Any

from jaxkv.attention import Implementation
from jaxkv.cli.options import Count, Mesh, Name, Natural, Spelled, Word, picked, whole
from jaxkv.loading import LanguageModel, load
from jaxkv.machine.compilation import enable_compilation_cache

Bits = Annotated[str, Word("BITS")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOption:
    """Option of commands with a model.

    Attributes:
        model: a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id.
    """

    model: Name = "smollm2-135m-instruct"

    def loaded(self, **options: Any) -> LanguageModel:
        """Load the model with options of `load`; compiled programs are cached on disk."""
        enable_compilation_cache()
        return load(self.model, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded(ModelOption):
    """Options of loading a model.

    Attributes:
        dtype: float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU).
        weights: quantise linear maps to int8, half the memory of 16 bits, or int4, a third (default: dtype).
    """

    dtype: Name | None = None
    weights: Bits | None = None

    def loaded(self, **options: Any) -> LanguageModel:
        """Load the model with this dtype and these weights."""
        return super().loaded(dtype=self.dtype, weights=self.weights, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computing(Loaded):
    """Option of the computation.

    Attributes:
        implementation: implementation of attention; auto for the fastest on the device.
    """

    implementation: Implementation = Implementation.AUTO


def _slots(text: str) -> int | str:
    """Parse the value of --slots: "auto", or an int of at least 1; ValueError for other text."""
    try:
        return text if text == "auto" else whole(text, least=1)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotOptions(Computing):
    """Options of commands with an engine.

    Attributes:
        served_model_name: name of the model in requests (default: the value of --model).
        mesh: devices to run on, such as 1x8: slots over D, kv heads over M.
        slots: number of requests answered at the same time; auto for as many as fit.
        max_prompt_tokens: maximum tokens of a prompt (default: 4096, if the model supports them).
        max_new_tokens: maximum tokens of an answer.
        max_question_tokens: maximum tokens of a question on a document; 0: no documents.
        documents: folder that keeps documents for the next start (default: none are kept).
    """

    served_model_name: Name | None = None
    mesh: Mesh | None = None
    slots: Annotated[int | str, Word("N", _slots)] = "auto"
    max_prompt_tokens: Count | None = None
    max_new_tokens: Count = 512
    max_question_tokens: Natural = 256
    documents: Name | None = None
    policy: Spelled

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.served_model_name or self.model

    def engine(self) -> dict[str, Any]:
        """Return the arguments of `Engine` that these options set."""
        names = "slots max_prompt_tokens max_new_tokens max_question_tokens implementation"
        return picked(self, names)
