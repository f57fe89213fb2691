"""Run every model family of tests/zoo as a target in draftlab: python -m benchmarks.any_target

Each family is built as a small model with random weights, in its own structure and file layout. With --smollm2, SmolLM2
is used to compare draftlab's own engine with the path that runs other families. The last line is one JSON object, which
is also written to benchmarks/results/any_target.json:

served: Fraction of all pairs of model and command (COMMANDS) that work.
refused: The pairs that do not work, with the reason in the error message.
generate_ratio: Tokens per CPU second of plain decoding in draftlab, divided by those of transformers' generate(), for
the slowest family. It is the median over rounds in which both take turns, at batch size 1, in one process, on one
thread.
equal_texts: Fraction of all combinations of model, drafter (DRAFTERS) and batch size (1 and 4) whose greedy speculative
text equals the text of generate().
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

from benchmarks import environment
from draftlab.config.kinds import parse_drafter
from draftlab.engine.drafters.context import DrafterContext
from draftlab.engine.drafters.dflash import DFlashDrafter
from draftlab.engine.drafters.dspark import DSparkDrafter
from draftlab.engine.drafters.ngram import LatestLookupDrafter
from draftlab.engine.generate import Drafter, decode, output_tokens, speculative_decode
from draftlab.errors import UserError
from draftlab.model import checkpoint, llama, modes
from draftlab.model.decoder import Decoder
from draftlab.model.dflash import DFlash, DFlashShape
from draftlab.model.dspark import DSpark, DSparkShape
from draftlab.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "any_target.json"
COMMANDS = [
    "prune depth",
    "distill",
    "outputs build",
    "outputs to replay",
    "replay",
    "score",
    "score a batch",
    "score sampled",
    "score without a draft",
    "distill a head",
    "score a head",
    "replay a head",
    "profile a head",
    "profile",
    "predict",
    "search",
    "check",
    "export vllm",
    "auto, planned",
]
DRAFTERS = [
    "model:draft=D",
    "parallel:draft=P",
    "latest-lookup",
    "ngram:order=2,tokens=500",
    "suffix",
]
DRAFTERS += ["fallback:draft=D", "eagle:heads=head"]
BATCHES, K, LENGTH = (1, 4), 3, 24
ROUNDS, TIMED = 9, 48  # number of timed rounds, and of new tokens in each round


def main(
    models: Annotated[list[str] | None, typer.Option(help="Names of models in tests/zoo/models.yaml.")] = None,
    smollm2: Annotated[Path | None, typer.Option(help="SmolLM2-135M-Instruct as imported by draftlab.")] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = RESULT,
) -> None:
    torch.set_num_threads(1)
    from tests.zoo.facts import zoo

    first = {facts.type: name for name, facts in reversed(zoo().items())}  # one model of each type
    rows: dict[str, Any] = {}
    for name in models or sorted(first.values()):
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = row(name, Path(folder))
        typer.echo(f"{name}: {json.dumps(rows[name])}", err=True)
    found = summary(rows) | {"models": rows}
    if smollm2 is not None:
        found["smollm2"] = paths(smollm2)
    result = {"benchmark": "any_target"} | found | environment(1)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def row(name: str, folder: Path) -> dict[str, Any]:
    """Measure one model of the zoo: which commands work, its speed, and whether its texts are right."""
    from tests.zoo.build import build
    from tests.zoo.facts import zoo
    from tests.zoo.law import draft_for, outcomes

    facts = zoo()[name]
    tried = list(outcomes(facts, folder, COMMANDS))
    tried = [each for each in tried if each.step in COMMANDS]
    if not (folder / "D").exists():
        build(draft_for(facts), folder / "D")
    target = modes.load(folder / "M", torch.float32, torch.device("cpu"))
    model = checkpoint.load_model(folder / "M", torch.float32).eval()
    texts = list(equal_texts(target, model, folder))
    return {
        "family": facts.family,
        "decoded_by": "engine" if target.architecture else "transformers",
        "works": [each.step for each in tried if each.works],
        "refused": {each.step: each.words for each in tried if not each.works},
        "unexpected": [each.line() for each in tried if not each.right],
        **pace(target.without_rollback(), model),
        "equal_texts": {what: equal for what, equal in texts if equal is not None},
        "no_texts": [what for what, equal in texts if equal is None],
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    works = sum(len(row["works"]) for row in rows.values())
    refused = sum(len(row["refused"]) for row in rows.values())
    equal = [same for row in rows.values() for same in row["equal_texts"].values()]
    slowest = min(rows, key=lambda name: rows[name]["generate_ratio"])
    return {
        "served": works / (works + refused),
        "refused": {name: row["refused"] for name, row in rows.items() if row["refused"]},
        "unexpected": [line for row in rows.values() for line in row["unexpected"]],
        "generate_ratio": rows[slowest]["generate_ratio"],
        "slowest": slowest,
        "equal_texts": sum(equal) / len(equal),
        "texts": len(equal),
    }


@torch.inference_mode()
def generated(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    """Return the tokens that generate() of transformers writes greedily.

    It runs in inference mode, which is faster than its own no_grad.
    """
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=[],
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def pace(target: Decoder, model: PreTrainedModel) -> dict[str, float]:
    """Time plain decoding in draftlab (target) and in transformers (model).

    Return the milliseconds per token of each, and the median ratio of their speeds over the rounds.
    """
    sampling = SamplingParams(max_tokens=TIMED)
    ways: list[Callable[[list[int]], object]] = [
        lambda prompt: output_tokens(decode(target, [prompt], sampling)),
        lambda prompt: generated(model, prompt, TIMED),
    ]
    seconds = timed(ways, prompts(len(ways), target.vocab or 0), ROUNDS)
    return {
        "ms_per_token": 1e3 * statistics.median(seconds[0]) / TIMED,
        "generate_ms_per_token": 1e3 * statistics.median(seconds[1]) / TIMED,
        "generate_ratio": statistics.median(b / a for a, b in zip(*seconds, strict=True)),
    }


def timed(ways: Sequence[Callable[[list[int]], object]], texts: list[list[int]], rounds: int) -> list[list[float]]:
    """Return the CPU seconds that each function in `ways` takes in each round.

    The functions take turns in a round. A first round warms up, and is not counted.
    """
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        turns = list(zip(ways, seconds, strict=True))
        for way, times in turns[:: 1 if number % 2 else -1]:
            start = time.process_time()
            way(texts[number % len(texts)])
            if number:
                times.append(time.process_time() - start)
    return seconds


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Return prompts of unequal lengths with repeated parts, so that copied tokens are accepted now and then."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(5, min(vocab, 290), 6 + 3 * i).tolist() for i in range(count)]
    return [[*part, *part[:5]] for part in parts]


def equal_texts(target: Decoder, model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, bool | None]]:
    """Yield, for each drafter and batch size, whether the speculative texts equal those of generate().

    None stands for a drafter that the target does not support.
    """
    texts, sampling = prompts(max(BATCHES), target.vocab or 0), SamplingParams(max_tokens=LENGTH)
    expected = [generated(model, prompt, LENGTH) for prompt in texts]
    shutil.copytree(folder / "D", folder / "P")
    config = json.loads((folder / "P" / "config.json").read_text())
    config |= {"pard_token": 3, "pard_offsets": K}
    (folder / "P" / "config.json").write_text(json.dumps(config))
    context = DrafterContext(
        target,
        folder / "M",
        lambda path: modes.load(path, torch.float32, torch.device("cpu")),
        folder / "D",
        device=torch.device("cpu"),
        data=str(folder / "text.txt"),
        sampling=sampling,
        ks=[K],
        mode="eager",
        clock=time.process_time,
    )
    for name in (*DRAFTERS, "dflash", "dspark"):
        for batch in BATCHES:
            try:
                drafter = drafter_of(name, context, folder)
                steps = speculative_decode(target, drafter, texts[:batch], K, sampling)
                yield f"{name}, batch {batch}", output_tokens(steps) == expected[:batch]
            except UserError as error:
                typer.echo(f"{name}, batch {batch}: {error}", err=True)
                yield f"{name}, batch {batch}: {error}", None


def drafter_of(name: str, context: DrafterContext, folder: Path) -> Drafter:
    """Return a drafter by its text as in --drafter. For "dflash" and "dspark", return a drafter with a random head."""
    if name not in ("dflash", "dspark"):
        for part in ("draft=", "heads="):
            name = name.replace(part, f"{part}{folder}/")
        return parse_drafter(name).build(context).drafter
    target: Any = context.target
    vocab, hidden = target.embed.shape
    ids = torch.arange(0, vocab, 3)
    shape = DFlashShape(
        layers=2,
        hidden=hidden,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=64,
        eps=1e-6,
        context=256,
        vocab=vocab,
        draft_vocab=len(ids),
        layer_ids=(1, 3),
        block_size=K + 2,
        mask_token_id=2,
        windows=(None, 6),
        causal=(False, True),
    )
    rope = 1 / 10000 ** (torch.arange(0, 16, 2) / 16), 1.0
    if name == "dflash":
        head = DFlash(shape, weights(shape), target.embed, target.head[ids], ids, rope)
        return DFlashDrafter(target, head)
    markov = {"markov_rank": 8, "markov_kind": "gated", "confidence": hidden + 8}
    spark = DSparkShape.model_validate(shape.model_dump() | markov)
    return DSparkDrafter(target, DSpark(spark, weights(spark), target.embed, target.head[ids], ids, rope))


def weights(shape: DFlashShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(size, generator=generator) for name, size in shape.sizes().items()}


def paths(folder: Path, length: int = 32, rounds: int = 6) -> dict[str, Any]:
    """Return tokens per CPU second of SmolLM2 in bf16, plain and with prompt lookup, by the path that runs it."""
    model = checkpoint.load_model(folder, torch.bfloat16).eval()
    eager = llama.load(folder, torch.bfloat16)
    targets: dict[str, Decoder] = {
        "native": modes.with_mode(eager, "native"),
        "eager": eager,
        "transformers": modes.hosted(model),
    }
    tokenizer, sampling = checkpoint.load_tokenizer(folder), SamplingParams(max_tokens=length)
    texts = [
        tokenizer.encode(f"def part{i}(line):\n    return [int(x) for x in line.split({i})]\n\ndef ")
        for i in range(rounds + 1)
    ]
    ways: dict[str, Callable[[list[int]], object]] = {"generate": lambda prompt: generated(model, prompt, length)}
    for name, target in targets.items():
        ways[name] = lambda prompt, target=target: output_tokens(decode(target, [prompt], sampling))
        ways[f"{name}, prompt lookup"] = lambda prompt, target=target: output_tokens(
            speculative_decode(target, LatestLookupDrafter(3), [prompt], K, sampling)
        )
    seconds = timed(list(ways.values()), texts, rounds)
    return {
        name: {
            "tokens_per_second": length / statistics.median(times),
            "over_generate": statistics.median(g / t for g, t in zip(seconds[0], times, strict=True)),
        }
        for name, times in zip(ways, seconds, strict=True)
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    typer.run(main)
