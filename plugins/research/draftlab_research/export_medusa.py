"""python -m draftlab_research.export_medusa: write Medusa heads in vLLM's layout, with a script that serves them."""

import json
import shlex
from pathlib import Path

from draftlab.cli import run_alone
from draftlab.commands.base import Job, Outcome, command
from draftlab.config import shared
from draftlab.config.base import OutputConfig, option
from draftlab.model import hub
from draftlab.output import Output


class ExportMedusaConfig(OutputConfig):
    heads: Path = option(help="Output of draftlab distill --student medusa.", argument=True)
    target: str = shared.target()


def prepare(config: ExportMedusaConfig, weights: bool) -> Job[ExportMedusaConfig]:
    return Job(lambda _: config, f"export-{config.heads.name}")


@command(ExportMedusaConfig, prepare=prepare)
def export_medusa(config: ExportMedusaConfig, output: Output) -> Outcome:
    """Write Medusa heads in vLLM's layout, with a script that serves them. vLLM drafts greedily with Medusa heads."""
    import torch
    from safetensors.torch import save_file

    from draftlab.model import checkpoint, devices
    from draftlab_research.drafting.medusa import read

    target = hub.locate(config.target)
    heads, weights = read(config.heads, target), checkpoint.Weights(target)
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
        f'exec vllm serve {shlex.quote(config.target)} --speculative-config "{settings}" "$@"',
        "",
    ]
    output.inputs([config.heads])
    with output.directory() as work:
        ready = {name: tensor.to(heads.dtype).contiguous() for name, tensor in tensors.items()}
        save_file(ready, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(content, indent=2))
        (work / "serve.sh").write_text("\n".join(script))
        output.record(work, k=k)
    path = str(output.out)
    return Outcome(path=output.out, show=[f"serve with: sh {path}/serve.sh", path], data={"path": path, "k": k})


if __name__ == "__main__":
    run_alone(export_medusa)
