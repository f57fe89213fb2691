"""Of each batch the tokens count on which the draft is furthest behind its reference."""

from dataclasses import replace

import numpy as np
import torch
from builders import build, setup
from test_distill import SETTINGS, RandomText, student, weights

from draftlab.data import Batch
from draftlab.distill.selection import Selection, furthest_behind
from draftlab.distill.trainer import train


def test_the_largest_gaps_stay_and_the_mask_elsewhere_is_untouched():
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 1]], dtype=np.float32)
    batch = Batch(np.arange(10).reshape(2, 5), mask)
    draft, reference = torch.tensor([5.0, 1, 9, 4, 4, 2]), torch.tensor([4.0, 1, 1, 4, 0, 5])
    kept = furthest_behind(batch, draft, reference, 0.5)  # gaps 1 0 8 0 4 -3
    assert kept.mask.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert batch.mask.sum() == 6
    assert furthest_behind(batch, draft, reference, 1.0).mask.tolist() == mask.tolist()


def test_a_step_with_a_selection_is_a_step_on_what_it_selects(tmp_path):
    """The selected tokens found by hand, from whole distributions."""
    teacher, reference = build("llama", 9, num_hidden_layers=3), build("llama", 5, num_hidden_layers=2)
    batch, keep = RandomText().batch(0), 0.4
    ids, counted = torch.from_numpy(batch.ids), torch.from_numpy(batch.mask) > 0

    def losses(model) -> torch.Tensor:
        with torch.no_grad():
            log_p, log_q = (m(ids[:, :-1]).logits[counted].log_softmax(-1) for m in (teacher, model))
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    gaps = losses(student()) - losses(reference)
    chosen = gaps.topk(round(keep * len(gaps))).indices
    flat = counted.flatten().nonzero().squeeze(1)[chosen]
    mask = np.zeros_like(batch.mask)
    mask.flat[flat.numpy()] = 1

    class Selected(RandomText):
        def batch(self, step: int) -> Batch:
            return Batch(batch.ids, mask)

    settings = replace(SETTINGS, steps=1)
    wanted, found, whole = student(), student(), student()
    held = [RandomText(masked=False).batch(7)]
    list(train(wanted, setup(teacher, Selected(), held), settings, tmp_path / "a"))
    given = replace(setup(teacher, RandomText(), held), selection=Selection(reference, keep))
    records = list(train(found, given, settings, tmp_path / "b"))
    list(train(whole, setup(teacher, RandomText(), held), settings, tmp_path / "c"))
    assert records[1].tokens == len(chosen)
    for name, weight in weights(wanted).items():
        torch.testing.assert_close(weights(found)[name], weight, atol=1e-6, rtol=1e-5)
    assert any(not torch.allclose(weights(whole)[name], weight, atol=1e-4) for name, weight in weights(wanted).items())
