"""`jaxkv fit-gate`: fits KVzap's linear gate to a model in some texts, and writes its file."""

import dataclasses
from typing import Annotated

from jaxkv.analysis import fit_gate
from jaxkv.cli.models import Model
from jaxkv.cli.options import Count, File, Word
from jaxkv.cli.outputs import Output, read_long_text, to_stdout


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitGate(Model):
    """`jaxkv fit-gate`.

    Attributes:
        model: a name from `jaxkv models`, a Hugging Face folder, a .gguf file or a hub id.
        texts: UTF-8 files, each one text of about a thousand tokens; - for stdin.
        out: safetensors file to write, for `--policy kvzap --gate FILE`.
        tokens: most tokens read of each text, if the model has as many positions.
        penalty: above 0: larger numbers make smaller weights, which fit these texts less.
    """

    model: Annotated[str, Word("MODEL", place=True)] = dataclasses.field()
    texts: Annotated[tuple[str, ...], Word("TEXT", tuple, "extend", place=True)]
    out: File
    tokens: Count = 2048
    penalty: float = 1.0

    def run(self) -> None:
        """Fits the gate, writes its file, prints how well each layer fits."""
        # Checked before minutes of work, which a file that cannot be written would waste.
        out = Output(flag="--out", name=self.out)
        out.check([*self.texts, self.model])
        texts = [read_long_text(name, "TEXT") for name in self.texts]
        params = self.loaded()
        most = min(self.tokens, params.config.max_positions)
        ids = [each[:most] for each in self.ids_of(params, texts)]
        fitted = fit_gate(params, ids, penalty=self.penalty)
        out.write(fitted.gate.to_bytes())
        to_stdout(f"gate of {self.model} from {fitted.tokens} tokens: {self.out}")
        shares = ", ".join(f"{share:.0%}" for share in fitted.explained)
        to_stdout(f"variance of the scores that it explains in these texts, by layer: {shares}")
