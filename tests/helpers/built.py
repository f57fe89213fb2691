"""Drafters as a score builds them, and the law that they decode what the target would."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftlab.drafters.base import RunFacts, parse_drafter
from draftlab.drafters.context import DrafterContext, DrafterRun
from draftlab.engine.generate import output_tokens, speculative_decode
from draftlab.model import checkpoint, modes
from draftlab.model.decoder import CPU
from draftlab.model.hf_decoder import HFDecoder
from draftlab.sampling import SamplingParams
from draftlab.scoring.throughput import PLAIN, measure_throughput
from helpers.second_device import DEVICE, SecondDevice

PROMPTS = [[0, 17, 44, 101, 9], [0, 5, 250, 31, 66]]


def built(context: DrafterContext, text: str) -> DrafterRun:
    return parse_drafter(text).build(context)


def check_output(context: DrafterContext, runs: Mapping[str, DrafterRun]) -> None:
    """Check that every drafter decodes what the target would."""
    found = measure_throughput(
        context.target,
        {name: (run.drafter, run.ks) for name, run in runs.items()},
        PROMPTS,
        sampling=SamplingParams(max_tokens=12),
        repeats=1,
        advance=lambda done: None,
    )
    assert {name for name, _ in found.tokens} == {"", *runs}
    assert all(tokens == found.tokens[PLAIN] for tokens in found.tokens.values())


def facts(**changed: Any) -> RunFacts:
    """Return a run of a target of five layers and 307 ids."""
    known: dict[str, Any] = {"layers": 5, "vocab": 307, "rule": "rejection", "draft": None}
    return RunFacts(**known | {"target": Path("target")} | changed)


def check_devices(context: DrafterContext, folders: Mapping[str, Path], asked: Sequence[str]) -> None:
    """Check that drafts and heads keep their device beside a target that transformers runs on the CPU."""
    place = folders["llama"]
    target = HFDecoder(checkpoint.load_model(place, torch.float32).eval())
    sampling = SamplingParams(max_tokens=12, temperature=1.0)

    def texts(device: torch.device) -> list[list[list[int]]]:
        work = DrafterContext(
            target,
            place,
            lambda path: modes.load(path, torch.float32, device),
            folders["qwen3"],
            data=context.data,
            sampling=sampling,
            ks=[3],
            mode="eager",
            clock=time.process_time,
            device=device,
        )
        drafters = [built(work, text).drafter for text in asked]
        return [output_tokens(speculative_decode(target, drafter, PROMPTS, 3, sampling)) for drafter in drafters]

    expected = texts(CPU)
    with SecondDevice():
        assert texts(DEVICE) == expected
