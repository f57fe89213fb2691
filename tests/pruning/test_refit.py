"""The walk runs the model it is given; rotating changes nothing; the refit finds what was planted."""

import pytest
import torch
from helpers.builders import FAMILIES, PASS_ROUNDING, assert_rounds, build
from helpers.errors import raises_option
from helpers.walks import IDS, opened, random_rotation, run_all, walk, walk_logits
from torch import Tensor, nn

from draftlab.model import checkpoint
from draftlab.model.shape import Shape
from draftlab.pruning.cut import Cut, Rotated, Untied, keep_all
from draftlab.pruning.importance import calibrate
from draftlab.pruning.refit import REFITS, Lockstep, Refit, _agreement, _fit_matrix, ridge_solve

UNTIED = [family for family in FAMILIES if "tied" not in family]


@pytest.mark.parametrize("family", FAMILIES)
def test_walking_gives_the_models_own_bits(family, family_dirs):
    source = family_dirs[family]
    weights, config = checkpoint.Weights(source), checkpoint.read_config(source)
    model = checkpoint.load_model(source, torch.float32)
    with torch.inference_mode():
        wanted = [model(row[None], use_cache=False).logits for row in IDS]
    found = run_all(walk(weights, config), [row[None] for row in IDS])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_walk_holds_one_layer_at_a_time(family_dirs):
    source = family_dirs["llama"]
    _, weights, config = opened(source)
    one = walk(weights, config)

    def real() -> int:
        return sum(p.numel() for p in one.model.parameters() if not p.is_meta)

    one.embed([IDS[:1]])
    assert real() == 0
    with one.layer(2):
        assert real() == sum(p.numel() for p in one.layers[2].parameters())
    assert real() == 0


@pytest.mark.parametrize("family", UNTIED)
def test_rotating_the_stream_changes_no_logit(family, family_dirs):
    source = family_dirs[family]
    have, weights, config = opened(source)
    rotation = random_rotation()
    turned = Rotated(weights, have, rotation)
    assert set(turned) == set(weights)
    there, here = (walk_logits(w, config) for w in (turned, weights))
    assert (there - here).abs().max() / here.abs().max() < PASS_ROUNDING
    skewed = Rotated(weights, have, rotation * 1.1)
    assert (walk_logits(skewed, config) - here).abs().max() > 0.01


@pytest.mark.parametrize("family", [family for family in FAMILIES if "tied" in family])
def test_a_tied_model_with_a_head_of_its_own_is_the_same_function_also_rotated(family, family_dirs):
    source = family_dirs[family]
    config, weights = checkpoint.read_config(source), checkpoint.Weights(source)
    have = checkpoint.read_shape(source).model_copy(update={"tied": False})
    untied, own = Untied(weights, have), config | {"tie_word_embeddings": False}
    rotation = random_rotation()
    here = walk_logits(weights, config)
    assert torch.equal(walk_logits(untied, own), here)
    there = run_all(walk(Rotated(untied, have, rotation), own), [IDS[:1]])[0]
    assert (there - here).abs().max() / here.abs().max() < PASS_ROUNDING


def test_a_tied_model_is_not_rotated(family_dirs):
    have = checkpoint.read_shape(family_dirs["llama3_tied"])
    with pytest.raises(ValueError, match="tied"):
        Rotated(checkpoint.Weights(family_dirs["llama3_tied"]), have, torch.eye(64))


def widened(small: nn.Module, shape: Shape, width: int) -> tuple[dict[str, Tensor], Shape]:
    """Return the same function in a residual stream of width dimensions of which only shape.hidden carry anything."""
    out, _ = torch.linalg.qr(torch.randn(width, shape.hidden, generator=torch.Generator().manual_seed(5)))
    share = (shape.hidden / width) ** 0.5  # an RMSNorm over more dimensions divides by less
    parameters = dict(small.named_parameters())
    wide = {}
    for name, axes in shape.axes().items():
        tensor = parameters[name].detach()
        if name.endswith("norm.weight"):
            wide[name] = torch.ones(width)
            continue
        if name == "lm_head.weight":
            tensor = tensor * parameters["model.norm.weight"].detach() * share
        elif axes[-1] == "hidden" and name != "model.embed_tokens.weight":
            norm = "input_layernorm" if "self_attn" in name else "post_attention_layernorm"
            tensor = tensor * parameters[f"model.layers.{name.split('.')[2]}.{norm}.weight"].detach() * share
        for dim, axis in enumerate(axes):
            if axis == "hidden":
                tensor = (tensor.movedim(dim, -1) @ out.T).movedim(-1, dim)
        wide[name] = tensor
    return wide, shape.model_copy(update={"hidden": width})


def test_principal_directions_find_a_narrow_stream_exactly():
    small = build("mistral", seed=6)
    shape = Shape(layers=5, hidden=64, heads=8, kv_heads=4, head_dim=12, ffn=88, vocab=307)
    weights, wide = widened(small, shape, 96)
    config = checkpoint.config_for(wide, small.config.to_dict())
    source = walk(weights, config)
    wanted = run_all(source, [IDS[:1]])[0]
    with torch.inference_mode():
        assert (small(IDS[:1]).logits - wanted).abs().max() / wanted.abs().max() < 1e-3
    importance = calibrate(source, wide, [row[None] for row in IDS], print).importance
    rotation = importance.principal(64)
    keep = keep_all(shape)
    draft = walk(Cut(Rotated(weights, wide, rotation), shape, keep), small.config.to_dict())
    how = Refit(layers=False)
    lockstep = Lockstep(source, draft, layers=keep.layers, basis=rotation, refit=how)
    found = refitted(lockstep, IDS, 2)
    assert float(found["model.norm.weight"].mean()) == pytest.approx((96 / 64) ** 0.5, rel=1e-3)
    there = run_all(walk(found, small.config.to_dict()), [IDS[:1]])[0]
    assert (there - wanted).abs().max() / wanted.abs().max() < 1e-3
    assert lockstep.agreement.acceptance > 0.999


def planted(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    change = torch.randn(20, 7, generator=torch.Generator().manual_seed(99))
    x = torch.randn(rows, 20, generator=rng)
    return x, x @ change, change


def test_ridge_recovers_a_planted_map_and_a_strong_one_changes_nothing():
    x, error, change = planted(400, 0)
    found = ridge_solve(x.T @ x, x.T @ error, 1e-9)
    assert_rounds(found, change.double())
    assert ridge_solve(x.T @ x, x.T @ error, 1e9).abs().max() < 1e-6


def test_activations_that_overflow_are_one_line():
    x = torch.full((400, 20), 1e30)
    with raises_option("--refit"):
        _fit_matrix(nn.Linear(20, 7, bias=False), iter([(x, x[:, :7])]), 1, 1e-9)


def test_a_refit_that_hurts_held_out_text_is_not_taken():
    linear = nn.Linear(20, 7, bias=False)
    before = linear.weight.detach().clone()
    x, error, _ = planted(400, 0)
    y, other, change = planted(100, 1)
    _fit_matrix(linear, iter([(x, error), (y, -other)]), 1, 1e-9)
    assert torch.equal(linear.weight, before)
    _fit_matrix(linear, iter([(x, error), (y, other)]), 1, 1e-9)
    assert_rounds(linear.weight.detach(), before + change.T)


def test_refitting_a_broken_output_matrix_repairs_it(family_dirs):
    """The draft is the source with one o_proj and one down_proj spoilt; the refit has all it needs to undo that."""
    have, weights, config = opened(family_dirs["qwen2"])
    spoilt, rng = dict(weights.items()), torch.Generator().manual_seed(3)
    for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        spoilt[name] = spoilt[name] + 0.2 * torch.randn(spoilt[name].shape, generator=rng)
    rows = torch.randint(3, 300, (30, 33), generator=torch.Generator().manual_seed(2))
    every = {"layers": list(range(have.layers)), "basis": torch.eye(64)}

    def agreement(refit: bool) -> float:
        how = Refit(norms=False, layers=refit, ridge=1e-6)
        lockstep = Lockstep(walk(weights, config), walk(spoilt, config), **every, refit=how)
        refitted(lockstep, rows, 20)
        return lockstep.agreement.acceptance

    assert agreement(False) < 0.9
    assert agreement(True) > 0.999


@pytest.mark.parametrize("family", [family for family in UNTIED if family != "olmo2"])
def test_the_streams_of_a_refit_are_those_of_the_written_draft(family, family_dirs):
    """A refit repeats only parts of a layer, with streams that the calibration kept, and with a trimmed head."""
    have, weights, config = opened(family_dirs[family])
    head, source = list(range(0, have.vocab, 2)), walk(weights, config)
    layers = [0, 2, have.layers - 1]
    fit, held_out = IDS[:2, None, :-1], IDS[2:, None]
    kept = calibrate(source, have, [*fit], print, heldout=[*held_out[..., :-1]], layers=lambda _: layers).streams
    assert kept.keys() == {*layers, have.layers}
    shape = have.model_copy(update={"layers": 3})
    cut = Cut(weights, shape, keep_all(have).model_copy(update={"layers": layers}))
    small = checkpoint.config_for(shape, config, layers)
    ways = {"layers": layers, "basis": torch.eye(64), "head_ids": head}
    known = Lockstep(source, walk(cut, small), **ways, refit=REFITS["head"], streams=kept)
    walked = Lockstep(source, walk(cut, small), **ways, refit=REFITS["head"])
    found, again = refitted(known, IDS, 2), refitted(walked, IDS, 2)
    assert all(torch.equal(found[name], again[name]) for name in cut)
    written = Lockstep(source, walk(found, small), **ways, refit=REFITS["none"])
    refitted(written, IDS, 2)
    assert known.agreement == walked.agreement == written.agreement
    before, after = cut["lm_head.weight"], found["lm_head.weight"]
    assert {*(before != after).any(1).nonzero().flatten().tolist()} <= {*head}


def refitted(lockstep: Lockstep, rows: Tensor, calibration: int) -> dict[str, Tensor]:
    """Return the tensors of a draft, fitted on the first rows and compared on the others."""
    fit, held_out = rows[:calibration, None, :-1], rows[calibration:, None]
    return dict(lockstep.tensors([*fit], [*held_out], print))


def test_both_cross_entropies_are_means_over_the_tokens_that_a_trimmed_head_has():
    rng = torch.Generator().manual_seed(3)
    source, draft = (torch.randn(1, 6, 8, generator=rng) for _ in range(2))
    ids, head = torch.tensor([[0, 1, 7, 3, 6, 2, 1]]), [0, 1, 2, 3]
    agreement = _agreement(iter([(source, draft[..., head], ids)]), head)
    inside = [i for i, label in enumerate(ids[0, 1:].tolist()) if label in head]
    labels = ids[0, 1:][inside]
    wanted = nn.functional.cross_entropy(draft[0, inside, :4], labels)
    of_source = nn.functional.cross_entropy(source[0, inside], labels)
    assert (agreement.tokens, agreement.predictable) == (6, 4)
    assert agreement.cross_entropy == pytest.approx(float(wanted))
    assert agreement.source_cross_entropy == pytest.approx(float(of_source))
