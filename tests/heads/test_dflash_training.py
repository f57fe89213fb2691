"""DFlash heads learn in the blocks that they will draft: the logits of decoding, and a killed run resumes."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.builders import PASS_ROUNDING, assert_rounds
from helpers.dflash_heads import loaded
from helpers.errors import raises_option
from helpers.head_training import check_killed_run, head_settings
from torch import Tensor, nn

from draftlab.commands import COMMANDS
from draftlab.data import Batch
from draftlab.heads.dflash import layout
from draftlab.heads.dflash.decoder import DFlash
from draftlab.heads.dflash.module import Anchors, BlockHead, BlockObjective
from draftlab.heads.training import TargetPass
from draftlab.model import checkpoint
from draftlab.training.fused_loss import Dense
from draftlab.training.losses import parse_loss

T, M, A = 24, 5, 4
SLIDES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


@pytest.fixture(scope="module")
def target(family_dirs) -> Path:
    return family_dirs["llama"]


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor]:
    """ids [2, T + 1], and states [2, T, L D] of the target."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 300, (2, T + 1), generator=generator)
    return ids, 3 * torch.randn(2, T, 3 * 64, generator=generator)


def random_student(target: Path, changes: dict[str, Any]) -> tuple[BlockHead, dict[str, Any]]:
    content: dict[str, Any] = layout.new_json(target, 2, (1, 2, 4), M, 2)
    content["dflash_config"] |= changes.pop("own", {})
    content |= changes
    config, layer = layout.parse_shape(content, target, Path("head"))
    weights = checkpoint.Weights(target)
    output = nn.Linear(64, config.vocab, bias=False)
    output.weight = nn.Parameter(weights["lm_head.weight"], requires_grad=False)
    torch.manual_seed(1)
    student = BlockHead(config, layer, weights["model.embed_tokens.weight"], output)
    for parameter in student.parameters():
        nn.init.normal_(parameter, std=0.3)
    student.scale.uniform_(0.5, 2)
    return student, content


def drafted(head: DFlash, ids: Tensor, states: Tensor, anchor: int) -> Tensor:
    """Return the logits of the block after an anchor of a text, [K, V], as the drafter computes them."""
    cache = head.new_cache(1, T)
    head.read(states[None, :anchor], torch.arange(anchor).unsqueeze(0), cache)
    cache.used = [anchor]
    return head.block_logits(ids[None, anchor], head.config.most, cache)[0]


@pytest.mark.parametrize(
    "changes",
    [{}, SLIDES, {"own": {"sample_from_anchor": True}}, SLIDES | {"own": {"causal": False}}],
    ids=["plain", "causal window", "anchor", "window"],
)
def test_blocks_in_training_have_the_logits_of_decoding(target, text, tmp_path, changes):
    student, content = random_student(target, dict(changes))
    layout.write(tmp_path, content, student.weights())
    head, (ids, states) = loaded(tmp_path, target), text
    anchors = torch.tensor([[1, 4, 9, 20], [3, 0, 15, 22]])
    with torch.no_grad():
        logits = student.get_output_embeddings()(student(ids[:, :-1], states, anchors))
    for row, places in enumerate(anchors.tolist()):
        for number, anchor in enumerate(places):
            assert_rounds(logits[row, number], drafted(head, ids[row], states[row], anchor))


def test_each_prediction_has_the_loss_and_gradient_that_its_place_in_the_block_gives(target, text):
    """Two texts in one row learn as they do apart."""
    student, _ = random_student(target, {})
    ids, states = text
    gamma, k = 3.0, student.config.most
    mask = torch.ones(2, T)
    mask[:, :3] = 0
    mask[1, 17:] = 0
    logits = torch.randn(2, T, student.config.vocab, generator=torch.Generator().manual_seed(5))
    anchors = Anchors(0.3, k, seed=2)
    batch = anchors.drawn(Batch(ids.numpy(), mask.numpy()), 7)
    depths = torch.from_numpy(cast(np.ndarray, batch.depths))
    assert (depths > 0).sum(1).tolist() == [7, 5]  # ceil(0.3 * 21) and ceil(0.3 * 14)
    objective = BlockObjective(student, parse_loss("fkl"), 1.0, gamma, anchors)
    weight = torch.exp(-torch.arange(k) / gamma)
    weight = weight / weight.mean()
    total, count, acceptance = torch.zeros(()), 0, torch.zeros(k)
    for row, anchor in (depths > 0).nonzero().tolist():
        hidden = student(ids[row : row + 1, :-1], states[row : row + 1], torch.tensor([[anchor]]))
        log_q = student.get_output_embeddings()(hidden)[0, 0].log_softmax(-1)
        for age in range(k):
            if not mask[row, anchor : anchor + age + 1].all() or anchor + age >= T:
                break
            p = logits[row, anchor + age].softmax(-1)
            total = total + weight[age] * (p * (p.log() - log_q[age])).sum()
            acceptance[age] += torch.minimum(p, log_q[age].exp()).sum().detach()
            count += 1
    assert count == batch.predictions
    total.backward()
    wanted = {name: cast(Tensor, p.grad).clone() for name, p in student.named_parameters()}

    def check(ids: Tensor, mask: Tensor, states: Tensor, logits: Tensor, *rest: Tensor | None) -> None:
        student.zero_grad()
        teacher = TargetPass(Dense(logits[mask > 0], None), states)
        sums = objective(ids, mask, teacher, *rest)
        sums[0, 5].backward()
        assert_rounds(sums[0, 5].detach(), total.detach())
        for name, parameter in student.named_parameters():
            assert_rounds(parameter.grad, wanted[name])
        with torch.no_grad():
            found = objective(ids, mask, teacher, *rest)[:, 2]
        assert_rounds(found, acceptance)

    check(ids, mask, states, logits, None, depths)
    one = {"states": states, "logits": logits}
    flat = {name: tensor.flatten(0, 1).unsqueeze(0) for name, tensor in one.items()}
    # each text's last token only is predicted, by the place before it
    joined = torch.cat([ids[0], ids[1]]).unsqueeze(0)
    places = torch.cat([torch.arange(T + 1), torch.arange(T)]).unsqueeze(0)
    gap = torch.zeros(1, 1)
    whole = {name: torch.cat([tensor[:, :T], tensor[:, :1], tensor[:, T:]], 1) for name, tensor in flat.items()}
    check(
        joined,
        torch.cat([mask[:1], gap, mask[1:]], 1),
        whole["states"],
        whole["logits"],
        places,
        torch.cat([depths[:1], gap.long(), depths[1:]], 1),
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory, target) -> dict[str, Any]:
    student = "dflash:block_size=4,num_layers=1,anchors=0.5"
    return head_settings(tmp_path_factory.mktemp("text"), target) | {"student": student}


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dflash") / "head"
    COMMANDS["distill"](**words, out=out)
    return out


def test_a_killed_run_writes_the_head_of_one_that_was_not(trained, words, tmp_path):
    check_killed_run(trained, words, tmp_path)


def test_training_goes_on_with_a_head_as_it_was_written(trained, words, tmp_path):
    """fc reads states that training divides by their sizes."""
    given = words | {"student": "dflash:anchors=0.5", "draft": str(trained), "steps": 1}
    found = cast(Any, COMMANDS["distill"](**given, out=tmp_path / "on").data)
    ended = json.loads((trained / "draftlab.json").read_text())["notes"]["after"]
    assert found["before"]["offsets"] == pytest.approx(ended["offsets"], rel=PASS_ROUNDING)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"student": "dflash:layer_ids=1+9"}, "1, 9"),
        ({"student": "dflash:mask_token_id=999"}, "mask_token_id"),
        ({"student": "dflash:block_size=1"}, "block_size"),
        ({"vocab": 50}, "--vocab"),
        ({"text": "draft", "prompt_tokens": 8}, "--text"),
        ({"draft": "head"}, "--draft"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_weights_are_read(words, tmp_path, given, named):
    with raises_option(named):
        COMMANDS["distill"](**words | given, dry_run=True, out=tmp_path / "head")
