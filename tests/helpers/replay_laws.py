"""Laws of drafters that are replayed: replay counts what decoding counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftlab.acceptance.expected import Counts, chain, texts_of
from draftlab.drafters.base import parse_drafter
from draftlab.drafters.context import DrafterContext, ReplayContext
from draftlab.engine.generate import Step, decode, output_tokens, speculative_decode
from draftlab.model import modes
from draftlab.model.decoder import Decoder
from draftlab.model.llama import Llama
from draftlab.sampling import SamplingParams
from helpers.builders import build
from helpers.built import built

KS = (1, 2, 4)
VOCAB = 307
PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 5, 250], [0, 90, 91, 92]]


@pytest.fixture(scope="module", name="noisy")
def noisy_fixture(family_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the target with noise, which agrees with it now and then."""
    folder = tmp_path_factory.mktemp("noisy") / "draft"
    build("llama", noise=0.3).save_pretrained(folder)
    return folder


@pytest.fixture(name="work")
def work_fixture(context: DrafterContext, noisy: Path) -> DrafterContext:
    return replace(context, draft=noisy)


def replayed(
    work: DrafterContext,
    text: str,
    texts: Sequence[list[int]],
    sampling: SamplingParams,
    prompts: Sequence[list[int]] = PROMPTS,
    log_p: Sequence[np.ndarray] | None = None,
) -> Callable[[int], Counts]:
    """Return the counts of a drafter by K, on texts of the target after prompts."""
    pairs = [(np.array(p), np.array(ids)) for p, ids in zip(prompts, texts, strict=True)]
    scores = parse_drafter(text).acceptance(
        ReplayContext(
            texts=pairs,
            limits=[sampling.max_tokens] * len(pairs),
            target_path=work.target_path,
            sampling=sampling,
            vocab=VOCAB,
            most=max(KS),
            load=work.load,
            load_target=lambda: work.target,
            advance=lambda done: None,
            draft=work.draft,
            data=work.data,
        )
    )
    zeros = [np.zeros(len(ids)) for ids in texts]
    chances = [s.chances(p)[1:] for s, p in zip(scores, log_p or zeros, strict=True)]
    kept = texts_of(
        chances,
        np.full(len(texts), sampling.max_tokens - 1),
        None if scores[0].drafted is None else [s.drafted[1:] for s in scores],
        None if scores[0].modelled is None else [s.modelled[1:] for s in scores],
    )
    return lambda k: chain(kept, k)


def check_counts(counts: Counts, row: int, steps: list[Step], text: list[int]) -> int:
    """Check that the counts of a text equal those of live steps, and return the number of accepted tokens."""
    live = steps[1:]  # without the prefill
    accepted = sum(min(step.accepted, len(step.tokens)) for step in live)
    assert counts.tokens[row] == len(text) - 1
    assert counts.passes[row] == len(live)
    assert counts.steps[row] == sum(step.drafted > 0 for step in live)
    assert counts.drafted[row] == sum(step.drafted for step in live)
    assert counts.accepted[row] == accepted
    return accepted


def check_greedy(work: DrafterContext, text: str) -> int:
    """Check every K, for texts that reach the length limit and for texts that end before it."""
    whole = output_tokens(decode(work.target, PROMPTS, SamplingParams(max_tokens=24)))
    accepted = 0
    for stops in ((), (whole[0][11],)):
        sampling = SamplingParams(max_tokens=24, stop_token_ids=stops)
        texts = output_tokens(decode(work.target, PROMPTS, sampling))
        counts = replayed(work, text, texts, sampling)
        drafter = built(work, text).drafter
        for k in KS:
            for row, prompt in enumerate(PROMPTS):
                steps = list(speculative_decode(work.target, drafter, [prompt], k, sampling))
                assert output_tokens(steps)[0] == texts[row]
                accepted += check_counts(counts(k), row, steps, texts[row])
    return accepted


def in_mode(work: DrafterContext, int8: bool) -> DrafterContext:
    """Return the context with all models in mode native."""

    def native(model: Decoder) -> Llama:
        assert isinstance(model, Llama)
        return modes.with_mode(model, "native", int8)

    load_eager = work.load
    target = native(work.target)
    return replace(work, target=target, load=lambda path: native(load_eager(path)), mode="native", int8=int8)
