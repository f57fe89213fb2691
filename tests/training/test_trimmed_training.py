"""The losses by their definitions, of whole and trimmed heads, one token after another."""

import shutil

import pytest
import torch
from helpers.loss_inputs import ALL, LOSSES, V, budget, inputs, same, top_k, whole
from torch import Tensor

from draftlab.commands import COMMANDS
from draftlab.errors import UserError
from draftlab.model.hf_files import write_head_ids
from draftlab.model.trimmed_head import TrimmedHead
from draftlab.training.fused_loss import Dense, TopK, fused_loss
from draftlab.training.losses import parse_loss

HEAD = torch.tensor([0, 3, 4, 8, 9, 15, 22, 23, 30])


def fused(x: dict[str, Tensor], name: str, temperature: float, teacher: Dense | TopK, ids: Tensor = HEAD):
    """Return the loss by the rows of the head that are in ids."""
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
    """Return the divergence of two measures on their common atoms, by definition; the mass of p may be less than 1."""
    lost, alpha = 1 - p.sum(), torch.minimum(p, q).sum()
    forward = (p * (p / q).log()).sum() + lost
    reverse = (q * (q / p).log()).sum() - lost
    m = 0.3 * p + 0.7 * q
    mixed = 0.3 * ((p * (p / m).log()).sum() + (m - p).sum()) + 0.7 * ((q * (q / m).log()).sum() + (m - q).sum())
    share = torch.exp(-3 * alpha.detach())
    return {
        "ce": 0 * alpha,
        "fkl": forward,
        "rkl": reverse,
        "jsd(0.3)": mixed,
        "tvd": 1 - alpha,
        "nla": -alpha.log(),
        "lk(3)": share * forward + (1 - share) * (1 - alpha),
        "0.7*fkl + 0.3*ce": 0.7 * forward,
    }[name]


def naive(x: dict[str, Tensor], name: str, temperature: float, ids: Tensor) -> dict[str, Tensor]:
    """Sums by the weights of tokens: distributions over all ids, of which the draft has those of the head."""
    ce_weight = {"ce": 1.0, "0.7*fkl + 0.3*ce": 0.3}.get(name, 0.0)
    totals = {key: torch.zeros((), dtype=torch.float64) for key in ALL}
    for hidden, teacher, label, weight in zip(
        x["hidden"], x["teacher_hidden"], x["labels"].tolist(), x["weights"], strict=True
    ):
        z, y = hidden @ x["head"][ids].T, teacher @ x["teacher_head"].T
        p, q = torch.softmax(y / temperature, 0)[ids], torch.softmax(z / temperature, 0)
        ce = -torch.log_softmax(z, 0)[ids.tolist().index(label)] if label in ids else torch.zeros(())
        each = {
            "objective": divergence(name, p, q) + ce_weight * ce,
            "cross_entropy": ce,
            "acceptance": torch.minimum(p, q).sum(),
            "agreement": (y.argmax() == ids[z.argmax()]).double(),
        }
        totals = {key: total + weight * each[key] for key, total in totals.items()}
    return totals


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("ids", [HEAD, torch.arange(V)], ids=["trimmed", "whole"])
def test_fused_is_the_definition(name, temperature, ids):
    x = inputs()
    found = fused(x, name, temperature, whole(x), ids)
    same(found, naive(x, name, temperature, ids), x, ALL)


@pytest.mark.parametrize("name", LOSSES)
def test_a_listed_teacher_that_lists_all_is_the_whole_one(name):
    x = inputs()
    found, wanted = fused(x, name, 1.0, top_k(x, V, 1.0)), fused(x, name, 1.0, whole(x))
    same(found, wanted._asdict(), x, ALL, 1e-8)
    few = fused(x, name, 1.0, top_k(x, 4, 1.0))
    low, high = float(few.acceptance), float(few.acceptance + few.slack)
    assert low - 1e-9 <= float(wanted.acceptance) <= high + 1e-9


@pytest.mark.parametrize(("draft", "target", "vocab"), [("trimmed", "whole", 150), ("whole", "trimmed", None)])
def test_a_head_is_trimmed_once_and_a_targets_never(draft, target, vocab, family_dirs, tmp_path):
    places = {"whole": family_dirs["llama"], "trimmed": tmp_path / "trimmed"}
    shutil.copytree(places["whole"], places["trimmed"])
    write_head_ids(places["trimmed"], range(200))
    models = {"draft": str(places[draft]), "target": str(places[target])}
    with pytest.raises(UserError):
        COMMANDS["distill"](**models, data="stdlib", vocab=vocab)
