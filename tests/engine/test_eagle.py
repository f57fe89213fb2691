"""EAGLE-3 in the engine: what it reads is where it should be, in texts of any length beside each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build
from plain_eagle import PlainHead

from draftlab.engine.drafters.eagle import EagleDrafter
from draftlab.engine.generate import Draft, decode, output_tokens, speculative_decode
from draftlab.errors import UserError
from draftlab.model import eagle, llama
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.eagle import Head
from draftlab.model.eagle_llama import EagleLlama
from draftlab.sampling import SamplingParams

PROMPTS = [[0, 17, 44, 101, 9, 17, 44], [0, 5, 250, 31, 66, 3, 8, 12, 99], [0, 90, 91]]


@pytest.fixture(scope="module", params=["native", "speculators"])
def folder(request: pytest.FixtureRequest, family_dirs: dict[str, Path], tmp_path_factory) -> Path:
    """A random head in a layout, with the residual of either side of its norm."""
    out, target = tmp_path_factory.mktemp("head"), family_dirs["llama"]
    config = eagle.head_config(target, None, 120, norm_before_residual=request.param == "speculators")
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(size, generator=generator) for name, size in config.sizes().items()}
    head = Head(config=config, weights=weights, ids=torch.arange(0, 240, 2), embedding=None)
    eagle.write(out, head, request.param, target=target, k=3)
    return out


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path]) -> llama.Llama:
    return llama.load(family_dirs["llama"], torch.float32)


def drafter_of(folder: Path, target: llama.Llama, family_dirs: dict[str, Path]) -> "Told":
    head = eagle.read(folder, family_dirs["llama"], target.embed.dtype)
    return Told(target, EagleLlama(head, target.embed, folder))


class Told(EagleDrafter):
    """Keeps what was asked and answered."""

    def reset(self, rows: int, capacity: int) -> None:
        super().reset(rows, capacity)
        self.seen: list[tuple[list[list[int]], Draft]] = []

    def propose(self, texts: Sequence[list[int]], count: int, sampling: SamplingParams, uniform: torch.Tensor) -> Draft:
        draft = super().propose(texts, count, sampling, uniform)
        self.seen.append(([list(text) for text in texts], draft))
        return draft


@pytest.mark.parametrize("rows", [1, 3])
def test_the_engine_drafts_what_a_plain_head_says_of_transformers_states(folder, target, family_dirs, rows):
    drafter, sampling = drafter_of(folder, target, family_dirs), SamplingParams(max_tokens=16)
    found = output_tokens(speculative_decode(target, drafter, PROMPTS[:rows], 3, sampling))
    assert found == output_tokens(decode(target, PROMPTS[:rows], sampling))
    model: Any = build("llama")
    plain = PlainHead.of(folder, model.get_input_embeddings().weight.detach())
    ends = [len(p) + len(f) for p, f in zip(PROMPTS, found, strict=False)]
    for texts, draft in drafter.seen:
        for row, text in enumerate(texts):
            if len(text) == ends[row]:
                continue  # a finished row: its drafts are ignored
            with torch.no_grad():
                states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            states = torch.cat([states[i][0] for i in (1, 2, 4)], -1)
            written = list(text)
            for step, token in enumerate(draft.ids[row].tolist()):
                logits = plain.chain(written, states, len(text) - 2, step + 1)[-1]
                assert token == plain.ids[logits.argmax()]
                written.append(token)


def test_what_is_sampled_is_what_q_says_and_only_draft_ids_are(folder, target, family_dirs):
    drafter, sampling = drafter_of(folder, target, family_dirs), SamplingParams(max_tokens=12, temperature=1.0)
    output_tokens(speculative_decode(target, drafter, PROMPTS, 4, sampling))
    for _, draft in drafter.seen:
        assert draft.q is not None
        assert draft.q.shape[-1] == 307
        assert not draft.q[..., 1::2].any()
        torch.testing.assert_close(draft.q.sum(-1), torch.ones(draft.ids.shape))
        assert (draft.q.gather(2, draft.ids.unsqueeze(2)) > 0).all()


def test_modes_without_states_are_refused(folder, target, family_dirs):
    head = EagleLlama(eagle.read(folder, family_dirs["llama"], torch.float32), target.embed, folder)
    with pytest.raises(UserError, match="mode"):
        EagleDrafter(CudaGraphLlama(target), head)
