"""Training with a trimmed head: the losses by their definitions, one atom after another, and a resumed run."""

import shutil
from pathlib import Path

import pytest
import torch
from test_fused_loss import ALL, LOSSES, V, budget, inputs, same, top_k, whole
from torch import Tensor

from draftlab.commands import COMMANDS
from draftlab.engine.drafters.parallel import ParallelDrafter
from draftlab.engine.generate import output_tokens, speculative_decode
from draftlab.errors import UserError
from draftlab.model.hf_files import read_head_ids, write_head_ids
from draftlab.model.modes import load
from draftlab.model.trimmed_head import TrimmedHead
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.replay import read_replay
from draftlab.target_outputs.store import read_store
from draftlab.training.fused_loss import Dense, TopK, fused_loss
from draftlab.training.losses import log_probs, parse_loss

HEAD = torch.tensor([0, 3, 4, 8, 9, 15, 22, 23, 30])


def fused(
    x: dict[str, Tensor], name: str, temperature: float, teacher: Dense | TopK, ids: Tensor = HEAD
):
    """By the rows of the head that are in ids."""
    trimmed = TrimmedHead.of(ids, V)
    given = (
        x["hidden"],
        x["head"][ids],
        x["labels"],
        x["weights"],
        teacher,
        parse_loss(name),
        temperature,
    )
    return fused_loss(*given, budget(x, 4), trimmed)


def divergence(name: str, p: Tensor, q: Tensor) -> Tensor:
    """Of measures on the atoms that both have, by definition; the mass of p may be less than 1."""
    lost, alpha = 1 - p.sum(), torch.minimum(p, q).sum()
    forward = (p * (p / q).log()).sum() + lost
    reverse = (q * (q / p).log()).sum() - lost
    m = 0.3 * p + 0.7 * q
    mixed = 0.3 * ((p * (p / m).log()).sum() + (m - p).sum()) + 0.7 * (
        (q * (q / m).log()).sum() + (m - q).sum()
    )
    share = torch.exp(-3 * alpha.detach())
    return {
        "ce": 0 * alpha, "fkl": forward, "rkl": reverse, "jsd(0.3)": mixed, "tvd": 1 - alpha, "nla": -alpha.log(),
        "lk(3)": share * forward + (1 - share) * (1 - alpha), "0.7*fkl + 0.3*ce": 0.7 * forward,
    }[name]  # fmt: skip


def naive(x: dict[str, Tensor], name: str, temperature: float) -> dict[str, Tensor]:
    """Sums by the weights of tokens: distributions over all ids, of which the draft has those of the head."""
    ce_weight = {"ce": 1.0, "0.7*fkl + 0.3*ce": 0.3}.get(name, 0.0)
    totals = {key: torch.zeros((), dtype=torch.float64) for key in ALL}
    for hidden, teacher, label, weight in zip(
        x["hidden"], x["teacher_hidden"], x["labels"].tolist(), x["weights"], strict=True
    ):
        z, y = hidden @ x["head"][HEAD].T, teacher @ x["teacher_head"].T
        p, q = torch.softmax(y / temperature, 0)[HEAD], torch.softmax(z / temperature, 0)
        ce = (
            -torch.log_softmax(z, 0)[HEAD.tolist().index(label)]
            if label in HEAD
            else torch.zeros(())
        )
        each = {
            "objective": divergence(name, p, q) + ce_weight * ce, "cross_entropy": ce,
            "acceptance": torch.minimum(p, q).sum(), "agreement": (y.argmax() == HEAD[z.argmax()]).double(),
        }  # fmt: skip
        totals = {key: total + weight * each[key] for key, total in totals.items()}
    return totals


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_is_the_definition(name, temperature):
    x = inputs()
    assert 0 < sum(label in HEAD for label in x["labels"].tolist()) < len(x["labels"])
    same(fused(x, name, temperature, whole(x)), naive(x, name, temperature), x, ALL)


@pytest.mark.parametrize("name", LOSSES)
def test_a_listed_teacher_that_lists_all_is_the_whole_one(name):
    x = inputs()
    found, wanted = fused(x, name, 1.0, top_k(x, V, 1.0)), fused(x, name, 1.0, whole(x))
    for key in ALL:
        torch.testing.assert_close(getattr(found, key), getattr(wanted, key), atol=1e-8, rtol=1e-8)
    gradients = [
        torch.autograd.grad(s.objective, [x["hidden"], x["head"]]) for s in (found, wanted)
    ]
    for there, here in zip(*gradients, strict=True):
        torch.testing.assert_close(there, here, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("k", [1, 4, 12])
def test_a_listed_teacher_bounds_the_acceptance_of_the_whole_one(k):
    x = inputs()
    found, wanted = fused(x, "fkl", 1.0, top_k(x, k, 1.0)), fused(x, "fkl", 1.0, whole(x))
    low = float(found.acceptance)
    assert low - 1e-9 <= float(wanted.acceptance) <= low + float(found.slack) + 1e-9


def test_lost_ids_would_change_the_loss():
    """A negative control: renormalised over the head, acceptance is too high."""
    x = inputs()
    y = log_probs((x["teacher_hidden"] @ x["teacher_head"].T)[:, HEAD], 1.0).exp()
    q = log_probs(x["hidden"] @ x["head"][HEAD].T, 1.0).exp()
    optimistic = float((torch.minimum(y, q).sum(1) * x["weights"]).sum().detach())
    assert optimistic > float(fused(x, "fkl", 1.0, whole(x)).acceptance) + 0.1


def test_a_trimmed_head_is_trained_to_draft_in_parallel_and_replay_counts_what_it_drafts(
    family_dirs, tmp_path, capsys
):
    target, text = str(family_dirs["llama_mha"]), tmp_path / "text.txt"
    text.write_text(
        "\n\n".join(f"def f{i}(x, y):\n    return [x + {i}, y * {i}]\n" * 8 for i in range(200))
    )
    COMMANDS["distill"](
        draft=str(family_dirs["llama"]), target=target, data=str(text), student="parallel:tokens=3", vocab=120, steps=4,
        batch_size=2, seq_len=32, eval_steps=4, out=tmp_path / "draft",
    )  # fmt: skip
    ids = read_head_ids(tmp_path / "draft", 307)
    assert ids is not None
    assert len(ids) == 120
    COMMANDS["outputs build"](
        use="replay", target=target, data=str(text), num_prompts=4, prompt_tokens=8, max_new_tokens=24,
        out=tmp_path / "answers",
    )  # fmt: skip
    COMMANDS["replay"](
        directory=tmp_path / "answers", draft=[str(tmp_path / "draft")], k=[3, 4], out=tmp_path / "replay"
    )  # fmt: skip
    assert capsys.readouterr().err.count("draft was trained to draft 3 tokens") == 1
    expected = read_replay(tmp_path / "replay" / "draft").counts(3)
    models = [
        load(path, torch.float32, torch.device("cpu"))
        for path in (Path(target), tmp_path / "draft")
    ]
    for row, output in enumerate(read_store(tmp_path / "answers").outputs):
        sampling = SamplingParams(max_tokens=24, stop_token_ids=(1,))
        drafter = ParallelDrafter(models[1], 307)
        steps = list(speculative_decode(models[0], drafter, [output.prompt.tolist()], 3, sampling))
        assert output_tokens(steps)[0] == output.ids.tolist()
        assert len(steps) - 1 == expected.passes[row]
        assert sum(step.accepted for step in steps) == expected.accepted[row]


@pytest.mark.parametrize(
    ("draft", "target", "vocab"), [("trimmed", "whole", 150), ("whole", "trimmed", None)]
)
def test_a_head_is_trimmed_once_and_a_targets_never(draft, target, vocab, family_dirs, tmp_path):
    places = {"whole": family_dirs["llama"], "trimmed": tmp_path / "trimmed"}
    shutil.copytree(places["whole"], places["trimmed"])
    write_head_ids(places["trimmed"], range(200))
    models = {"draft": str(places[draft]), "target": str(places[target])}
    with pytest.raises(UserError):
        COMMANDS["distill"](**models, data="stdlib", vocab=vocab)
