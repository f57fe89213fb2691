"""EAGLE-3 heads learn on what they will read: the unrolled steps are those of decoding, and a killed run resumes."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.builders import FAMILIES, PASS_ROUNDING, assert_rounds, build
from helpers.head_training import check_killed_run, distilled_from_store, head_settings
from helpers.plain_eagle import VARIANTS, PlainHead
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from draftlab.commands import COMMANDS
from draftlab.data import Batch
from draftlab.errors import UserError
from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.layout import Head, HeadShape
from draftlab.heads.eagle3.module import EagleHead
from draftlab.heads.training import ChainObjective, HeadTeacher, StoredRows, TargetPass, within_chains
from draftlab.model.trimmed_head import TrimmedHead
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.training.fused_loss import Dense
from draftlab.training.losses import parse_loss

T, L, V, W, E, D = 9, 4, 37, 11, 16, 16
SIZES = {
    "hidden": D,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "ffn": 24,
    "eps": 1e-5,
    "context": 64,
    "rope": {"rope_type": "default", "rope_theta": 100.0},
    "vocab": V,
    "draft_vocab": W,
    "target_hidden": E,
    "layer_ids": (1, 2, 4),
}


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_head(**variant: Any) -> Head:
    config = HeadShape(**SIZES | {"norm_before_residual": False} | variant)
    weights = {name: 0.4 * random(*size, seed=i) for i, (name, size) in enumerate(config.sizes().items())}
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:W].sort().values
    return Head(config=config, weights=weights, ids=ids, embedding=random(V, D, seed=99))


def plain_of(head: Head) -> PlainHead:
    c = head.config
    sizes = {
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
    }
    sizes |= {"rms_norm_eps": c.eps, "rope_parameters": c.rope}
    weights = {n.removeprefix("layers.0."): w.clone().requires_grad_() for n, w in head.weights.items()}
    embedding = cast(Tensor, head.embedding)
    return PlainHead(sizes, weights, head.ids, embedding, c.norm_before_residual, c.norm_output, c.sliding_window)


@pytest.fixture
def text() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [2, T + 1], a mask, states [2, T, A E] and the target's logits [2, T, V]."""
    ids = torch.randint(0, V, (2, T + 1), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, T, dtype=torch.float64)
    mask[1, 6:] = 0
    mask[:, :L] = 0
    return ids, mask, random(2, T, 3 * E, seed=7), 2 * random(2, T, V, seed=8)


def module_of(head: Head) -> EagleHead:
    student = EagleHead(head.config, cast(Tensor, head.embedding)).double()
    student.load_state_dict(dict(head.weights))
    return student


@pytest.mark.parametrize("variant", VARIANTS)
def test_unrolled_steps_are_those_of_decoding_token_by_token(text, variant):
    ids, _, states, _ = text
    head = random_head(**VARIANTS[variant])
    student, plain = module_of(head), plain_of(head)
    outputs = [student.lm_head(hidden) for hidden in student(ids[:, :-1], states, L)]
    for row in range(2):
        for start in range(T - L):
            wanted = plain.chain(ids[row].tolist(), states[row], start, L)
            for step in range(L):
                assert_rounds(outputs[step][row, start], wanted[step])


@pytest.mark.parametrize(
    ("loss", "variant"),
    [("0.5*lk(3) + 0.2*ce", "plain"), ("tvd", "speculators"), ("fkl", "fc_norm")],
)
def test_training_time_test_has_the_loss_and_gradients_of_a_plain_unrolling(text, loss, variant):
    """Each counted token, predicted by each step of the chain that ends there; p over all ids of the target."""
    ids, mask, states, logits = text
    head, parsed = random_head(**VARIANTS[variant]), parse_loss(loss)
    student, plain = module_of(head), plain_of(head)
    counted = mask.flatten().nonzero().squeeze(1)
    own = logits.flatten(0, 1)[counted]
    teacher = Dense(own[:, head.ids], None, log_total=own.logsumexp(-1))
    objective, target = (
        ChainObjective(student, TrimmedHead.of(head.ids, student.config.vocab), parsed, 1.0, L),
        TargetPass(teacher, states),
    )
    with torch.no_grad():
        found = objective(ids, mask, target)
    objective(ids, mask, target)[0, 5].backward()
    total, acceptance = torch.zeros((), dtype=torch.float64), torch.zeros(L, dtype=torch.float64)
    for row, t in mask.nonzero().tolist():
        p = torch.softmax(logits[row, t], -1)[head.ids]
        for step in range(L):
            log_q = plain.chain(ids[row].tolist(), states[row], t - 1 - step, step + 1)[step].log_softmax(-1)
            q = log_q.exp()
            alpha = torch.minimum(p, q).sum()
            label = (head.ids == ids[row, t + 1]).nonzero().flatten().tolist()
            ce = -log_q[label[0]] if label else torch.zeros(())
            fkl, acceptance[step] = (p * (p.log() - log_q)).sum(), acceptance[step] + alpha.detach()
            far = (-3 * alpha.detach()).exp()
            value = {"fkl": fkl, "tvd": 1 - alpha}.get(loss, 0.5 * (far * fkl + (1 - far) * (1 - alpha)) + 0.2 * ce)
            total = total + value / L
    total.backward()
    assert_rounds(found[:, 2], acceptance)
    for name, parameter in student.named_parameters():
        wanted = plain.weights[name.removeprefix("layers.0.")].grad
        assert_rounds(parameter.grad, wanted)


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=307, n_embd=64, n_layer=5, n_head=4, n_positions=64)).eval()


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_the_teacher_gives_the_states_and_probabilities_of_transformers(family):
    model = gpt2() if family == "gpt2" else build(family)
    ids, layers = np.random.default_rng(0).integers(3, 300, (2, 13)), (0, 2, 4)
    mask = np.ones((2, 12), np.float32)
    mask[1, 5:] = 0
    draft_ids = torch.arange(5, 100, 3)
    teacher = HeadTeacher(model, layers, draft_ids, 1.5, torch.device("cpu"))
    found = teacher.distributions(Batch(ids, mask))
    with torch.no_grad():
        wanted: Any = model(torch.from_numpy(ids[:, :-1]), output_hidden_states=True)
    torch.testing.assert_close(found.states, torch.cat([wanted.hidden_states[i] for i in layers], -1))
    p = torch.softmax(wanted.logits / 1.5, -1)[torch.from_numpy(mask) > 0][:, draft_ids]
    dense = found.distributions
    logits = dense.logits(slice(None))
    torch.testing.assert_close((logits / 1.5 - cast(Tensor, dense.log_total).unsqueeze(1)).exp(), p)


def test_sequences_that_share_a_row_learn_as_if_they_were_apart():
    model = build("llama").double()
    ids = np.random.default_rng(2).integers(3, 300, (4, 17))
    mask = np.zeros((4, 16), np.float32)
    for row, (first, end) in enumerate([(2, 16), (5, 9), (1, 6), (3, 8)]):
        mask[row, first:end] = 1
    apart = within_chains(Batch(ids, mask), L)
    packed = apart.packed()
    assert len(packed.ids) < 4
    teacher = HeadTeacher(model, (1, 2, 4), torch.arange(5, 100), 1.0, model.device)
    assert teacher.takes_packed
    found = []
    for batch in (apart, packed):
        config = HeadShape(
            **SIZES | {"vocab": 307, "draft_vocab": 95, "hidden": 64, "target_hidden": 64},
            norm_before_residual=False,
        )
        torch.manual_seed(0)
        student = EagleHead(config, teacher.embedding).double()
        objective = ChainObjective(
            student, TrimmedHead.of(teacher.ids, student.config.vocab), parse_loss("0.5*lk(3) + 0.2*ce"), 1.0, L
        )
        given = (
            torch.from_numpy(batch.ids),
            torch.from_numpy(batch.mask),
            teacher.distributions(batch),
        )
        positions = None if batch.positions is None else torch.from_numpy(batch.positions)
        sums = objective(*given, positions)
        sums[0, 5].backward()
        found.append((sums[0, :5], {name: p.grad for name, p in student.named_parameters()}))
    assert_rounds(found[1][0], found[0][0])
    for name, gradient in found[0][1].items():
        assert_rounds(found[1][1][name], gradient)


def test_every_stored_sequence_is_read_once_in_an_epoch():
    outputs = [TargetOutput(number=i, prompt=np.array([i]), ids=np.array([i, i])) for i in range(6)]
    rows = StoredRows(outputs, 4, 3, seed=1)
    seen = np.concatenate([rows.batch(step).ids[:, 0] for step in range(3)])
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert rows.batch(0).mask.tolist() == [[1, 1, 0]] * 4


@pytest.fixture(scope="module")
def words(tmp_path_factory, family_dirs) -> dict[str, Any]:
    own = {"student": "eagle:ttt_steps=2", "vocab": 50}
    return head_settings(tmp_path_factory.mktemp("text"), family_dirs["llama"]) | own


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("eagle") / "head"
    COMMANDS["distill"](**words, out=out)
    return out


def test_a_killed_run_writes_the_head_of_one_that_was_not(trained, words, tmp_path):
    check_killed_run(trained, words, tmp_path)


def test_training_goes_on_with_a_head_as_it_was_written(words, trained, tmp_path):
    """It keeps its ids and its held-out losses; here the head is exported for a server."""
    exported, out = tmp_path / "exported", tmp_path / "on"
    COMMANDS["export"](draft=str(trained), target=words["target"], to="speculators", out=exported)
    given = {name: value for name, value in words.items() if name != "vocab"}
    found = cast(Any, COMMANDS["distill"](**given, draft=str(exported), out=out).data)
    ended = json.loads((trained / "draftlab.json").read_text())["notes"]["after"]
    assert found["before"]["offsets"] == pytest.approx(ended["offsets"], rel=PASS_ROUNDING)
    assert found["before"]["loss"] == pytest.approx(ended["loss"], rel=PASS_ROUNDING)
    ids = [layout.read(head, Path(words["target"]), torch.float32).ids for head in (trained, out)]
    assert torch.equal(*ids)


def test_a_head_learns_from_stored_outputs_of_the_target(words, tmp_path):
    found = distilled_from_store(words, tmp_path)
    assert 0 < found["tokens"] <= 6 * 2 * 20  # the prompts do not count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"student": "eagle:layer_ids=1+9"}, "1, 9"),
        ({"student": "eagle:layer_ids=1+x"}, "--student eagle:layer_ids=1"),
        ({"vocab": 400}, "400"),
        ({"text": "draft", "prompt_tokens": 8}, "--text"),
        ({"student": "eagle:ttt_steps=15", "seq_len": 16}, "too short"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_weights_are_read(words, tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        COMMANDS["distill"](**words | given, dry_run=True, out=tmp_path / "head")
