"""Drafters as a score builds them, and the law that they decode what the target would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftlab.config.kinds import RunFacts, parse_drafter
from draftlab.engine.drafters.context import DrafterContext, DrafterRun
from draftlab.sampling import SamplingParams
from draftlab.scoring.throughput import PLAIN, measure_throughput

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
