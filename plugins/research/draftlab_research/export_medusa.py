"""python -m draftlab_research.export_medusa: write Medusa heads in vLLM's layout, with a script that serves them."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftlab.cli import run_alone
from draftlab.commands.base import Command, Outcome
from draftlab.config import shared
from draftlab.config.base import OutputConfig, option
from draftlab.model import checkpoint, devices, hub
from draftlab.output import Output
from draftlab_research.drafting.medusa import read


class ExportMedusaConfig(OutputConfig):
    heads: Path = option(help="Output of draftlab distill --student medusa.", argument=True)
    target: str = shared.target()


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaExport:
    heads: Path
    target: str

    @property
    def name(self) -> str:
        return f"export-{self.heads.name}"

    def run(self, output: Output) -> int:
        """Write the heads. Return their number. Raises UserError: the heads do not fit the target."""
        target = hub.locate(self.target)
        heads, weights = read(self.heads, target), checkpoint.Weights(target)
        k = len(heads)  # every head drafts one token
        shared_head = weights["lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"]
        tensors: dict[str, torch.Tensor] = {f"blocks.{i}.layers.0.weight": heads[i] for i in range(k)}
        tensors["lm_heads.0.weight"] = shared_head
        dtype = devices.dtype_name(heads.dtype)
        content = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": heads.shape[-1],
            "vocab_size": len(shared_head),
            "num_heads": k,
            "num_hidden_layers": 1,
            "original_lm_head": True,
            "medusa_fc_bias": False,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        settings = json.dumps({"method": "medusa", "model": "$here", "num_speculative_tokens": k}).replace('"', '\\"')
        script = [
            "#!/bin/sh",
            'here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)',
            f'exec vllm serve {shlex.quote(self.target)} --speculative-config "{settings}" "$@"',
            "",
        ]
        output.inputs([self.heads])
        with output.directory() as work:
            ready = {name: tensor.to(heads.dtype).contiguous() for name, tensor in tensors.items()}
            save_file(ready, work / "model.safetensors", metadata={"format": "pt"})
            (work / "config.json").write_text(json.dumps(content, indent=2))
            (work / "serve.sh").write_text("\n".join(script))
            output.record(work, k=k)
        return k


def prepare(config: ExportMedusaConfig, weights: bool) -> MedusaExport:
    return MedusaExport(heads=config.heads, target=config.target)


def show(k: int, config: ExportMedusaConfig, out: Path) -> Outcome:
    path = str(out)
    return Outcome(path=out, show=[f"serve with: sh {path}/serve.sh", path], data={"path": path, "k": k})


EXPORT_MEDUSA = Command(
    name="export-medusa",
    config=ExportMedusaConfig,
    module=__name__,
    help="Write Medusa heads in vLLM's layout, with a script that serves them. vLLM drafts greedily with Medusa heads.",
)

if __name__ == "__main__":
    run_alone(EXPORT_MEDUSA)
