"""Time a target of LLaMA-65B's shape with drafts of the paper's shapes, on real text and with real acceptance.

The target is a small model expanded on the device (expand.py). It writes the same text as the small model, but a pass
costs as much as one of --target's shape, with head_dim and vocabulary of the small model. Each draft is the same pruned
draft of the small model, expanded to one of the paper's shapes. So all drafts propose the same tokens, and only their
cost differs. Shapes that are too small for the pruned draft are left out. If the target does not fit the device, it has
as many layers as fit ("layers"). "beside_paper": the speed-up of Wide-796M divided by that of the deep draft here, and
divided by that of earlier drafts in the paper.
"""

import gc
import json
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from benchmarks import environment
from benchmarks.expand import Expanded, check_contains
from benchmarks.large_target import DRAFTS, PAPER, ROOM, as_fits, over, shape_of
from draftlab.console import note
from draftlab.data import heldout_prompts
from draftlab.engine.generate import ModelDrafter, Step, decode, output_tokens, speculative_decode
from draftlab.engine.timing import bandwidth_gbs
from draftlab.errors import UserError
from draftlab.latency.cost_model import pass_bytes
from draftlab.latency.machine_state import device_name, steady_clock, steady_step_clock
from draftlab.model import checkpoint, devices, hub
from draftlab.model.cuda_graphs import BUCKET
from draftlab.model.llama import Llama, rotary
from draftlab.model.modes import with_mode
from draftlab.model.shape import Shape, parse_numbers
from draftlab.sampling import SamplingParams


def main(
    cut: Annotated[Path, typer.Option(help="Draft pruned from the source.")],
    source: Annotated[str, typer.Option(help="Checkpoint to expand to the target.")] = "tiny",
    target: Annotated[str, typer.Option(help="Shape of the target.")] = "llama-65b",
    drafts: Annotated[str, typer.Option(help="Shapes of drafts, separated by commas.")] = DRAFTS,
    k: Annotated[str, typer.Option(help="Drafted tokens per step, such as 1,2,4.")] = "1,2,3,4",
    data: Annotated[str, typer.Option(help="Data whose held-out text gives prompts.")] = "stdlib",
    prompts: Annotated[int, typer.Option(help="Prompts, not counting the warm-up's.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 48,
    mode: Annotated[str, typer.Option(help="eager, native or graphs.")] = "graphs",
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    room: Annotated[float, typer.Option(help="Bytes to leave free beside the target.")] = ROOM,
) -> None:
    place, kind, ks = torch.device(device), devices.DTYPES[dtype], parse_numbers(k)
    origin, draft = hub.locate(source), hub.locate(cut)
    tokenizer, context = (
        checkpoint.load_tokenizer(origin),
        -(-(prompt_tokens + new_tokens + max(ks)) // BUCKET) * BUCKET,
    )
    texts = heldout_prompts(data, tokenizer, count=prompts + 1, length=prompt_tokens, seed=0)
    whole = like(shape_of(target), checkpoint.read_shape(origin))
    shape = as_fits(whole, devices.free_bytes(place) - room, kind.itemsize)
    note(f"{source} is expanded to {shape.describe()}, {shape.layers} of {whole.layers} layers")
    ceiling = bandwidth_gbs(shape.params(), kind, place)
    model = with_mode(expanded(origin, shape, kind, place, context), mode)  # type: ignore[arg-type]
    bench = Bench(model, texts, new_tokens, place)
    alone, said = bench.run(None, 0)
    rows: dict[str, list[dict[str, float]]] = {}
    for name in drafts.split(","):
        of_paper = like(shape_of(name), checkpoint.read_shape(draft))
        try:
            check_contains(of_paper, checkpoint.read_shape(draft))
        except UserError as error:
            note(f"{name} is left out: {error}")
            continue
        drafter = ModelDrafter(with_mode(expanded(draft, of_paper, kind, place, context), mode))  # type: ignore[arg-type]
        rows[name] = []
        for count in ks:
            found, text = bench.run(drafter, count)
            same = sum(a == b for one, other in zip(said, text, strict=True) for a, b in zip(one, other, strict=False))
            found |= {"k": count, "same_tokens": same / sum(map(len, said))}
            rows[name].append(found | {"speedup": found["tokens_per_second"] / alone["tokens_per_second"]})
        del drafter
        gc.collect()
        note(f"{name}: {max(row['speedup'] for row in rows[name]):.2f} x the speed of plain decoding")
    best = {name: max(row["speedup"] for row in found) for name, found in rows.items()}
    read = pass_bytes(shape, dtype) * alone["tokens_per_second"] / 1e9
    result = {
        "benchmark": "expanded_target",
        "source": source,
        "target": target,
        "layers": shape.layers,
        "of_layers": whole.layers,
        "dtype": dtype,
        "mode": mode,
        "device": device_name(place),
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "plain_tokens_per_second": alone["tokens_per_second"],
        "bandwidth_gbs": ceiling,
        "share_of_bandwidth": read / ceiling,
        "speedup": best,
        "rows": rows,
        "beside_paper": {"paper": PAPER, "wide_796m_over_noft_1.3b": over(best, "wide-796m", "noft-1.3b")},
    }
    print(json.dumps(result | environment(torch.get_num_threads())))


class Bench:
    """A target to time on prompts, of which the first is a warm-up."""

    def __init__(self, target: Llama, prompts: list[list[int]], new_tokens: int, device: torch.device) -> None:
        self.target, self.prompts, self.sampling = (
            target,
            prompts,
            SamplingParams(max_tokens=new_tokens),
        )
        self.clock, self.step_clock = steady_clock(device), steady_step_clock(device)

    def run(self, drafter: ModelDrafter | None, k: int) -> tuple[dict[str, float], list[list[int]]]:
        """Decode all prompts. Return tokens per second after the prefill, tokens per target pass, and the texts."""
        rates, passes, texts = [], [], []
        for number, prompt in enumerate(self.prompts):
            if drafter is None:
                steps = decode(self.target, [prompt], self.sampling, self.step_clock)
            else:
                steps = speculative_decode(self.target, drafter, [prompt], k, self.sampling, self.step_clock)
            first: list[Step] = [next(steps)]  # the prefill
            began = self.clock()
            rest = list(steps)
            seconds, made = self.clock() - began, sum(len(step.tokens) for step in rest)
            if number:
                rates.append(made / seconds)
                passes.append(made / max(1, len(rest)))
                texts.append(output_tokens(first + rest)[0])
        return {
            "tokens_per_second": median(rates),
            "tokens_per_pass": sum(passes) / len(passes),
        }, texts


def like(shape: Shape, source: Shape) -> Shape:
    """Return a shape with head_dim, vocabulary and options of a source, but its own heads x head_dim."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads = {"heads": q // source.head_dim, "kv_heads": kv // source.head_dim}
    return source.model_copy(update={"layers": shape.layers, "hidden": shape.hidden, "ffn": shape.ffn} | heads)


def expanded(directory: Path, shape: Shape, dtype: torch.dtype, device: torch.device, context: int) -> Llama:
    """Load a checkpoint expanded to a shape. Each weight is expanded on the device when it is read.

    Raises:
        UserError: The shape does not contain the checkpoint's shape.
    """
    have, config = checkpoint.read_shape(directory), checkpoint.auto_config(directory)
    check_contains(shape, have)
    frequencies, scale = rotary(config, have.head_dim, directory)
    weights = Expanded(checkpoint.Weights(directory, dtype, device), have, shape, seed=0)
    return Llama(
        shape,
        weights,
        frequencies,
        scale,
        config.rms_norm_eps * have.hidden / shape.hidden,
        context,
    )


if __name__ == "__main__":
    typer.run(main)
