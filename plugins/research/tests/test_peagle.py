"""P-EAGLE heads: what speculators computes; what replay says is what is drafted; heads of other kinds are named."""

import json
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import assert_rounds
from helpers.dflash_heads import LAYER
from helpers.drafter_laws import VOCAB, replay_errors, save_models
from helpers.errors import raises_option
from helpers.head_texts import T, V, draft_ids, random_text, speculators_model
from research_heads import MASK, PEAGLE, K, peagle_drafter, written_peagle

import draftlab
from draftlab.exporting.artifact import check_files, open_artifact, open_checkable
from draftlab.heads.eagle3 import decoder
from draftlab.heads.eagle3.drafter import score_chains
from draftlab.model import hub, llama
from draftlab.model.checkpoint import Checkpoint
from draftlab.registry import SERVERS
from draftlab.sampling import SamplingParams
from draftlab_research import peagle
from draftlab_research.peagle import PEagleDrafter

SLIDING = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 8,
    "use_sliding_window": True,
}
QWEN = {"transformer_layer_config": LAYER | {"head_dim": 8} | SLIDING}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"norm_before_fc": True, "norm_output": True}, QWEN | {"fc_norm": True}],
    ids=["plain", "norms", "qwen slides"],
)
def test_speculators_computes_the_same_logits(target, tmp_path, fields, monkeypatch):
    """The logits are compared at every anchor and depth of a text."""
    content = PEAGLE | fields
    folder, (ids, states) = written_peagle(tmp_path / "head", target, content), random_text(T + 1)
    model = speculators_model("peagle", "PEagle", folder, target, content)
    anchors = torch.cat([torch.arange(T), *[torch.arange(T - depth) for depth in range(1, K)]])
    depths = torch.cat([torch.full((T - depth,), depth) for depth in range(K)])
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: found.append(call[2][0].detach()))
    core = import_module("speculators.models.peagle.core")
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **given: (anchors, depths))
    with torch.no_grad():
        model(
            hidden_states=states,
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, T, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, T, 64),
            loss_config=import_module("speculators.losses").resolve_loss_config("kl_div", "eager"),
        )
    hosted = llama.load(target, torch.float32)
    head = peagle.load(folder, target, hosted, hosted.device)
    assert head.mask is not None
    for anchor in range(T):
        count = min(K, T - anchor)
        read = torch.cat([ids[:, 1 : anchor + 2], torch.full((1, count - 1), MASK)], 1)
        masks = head.mask[1].expand(1, count - 1, -1)
        inputs = torch.cat([head.combine(states[:, : anchor + 1]), masks], 1)
        own_logits, _ = head.step(read, inputs, head.new_cache(1, 32), count)
        theirs = torch.stack([found[0][int(((anchors == anchor) & (depths == d)).nonzero())] for d in range(count)])
        assert_rounds(own_logits[0][:, draft_ids()], theirs)


def test_the_compiled_head_drafts_from_the_distributions_of_the_eager_one(target, tmp_path):
    """The batch has rows of different lengths."""
    folder = written_peagle(tmp_path / "head", target, PEAGLE | QWEN)
    model = llama.load(target, torch.float32)
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (16, 11, 14)]
    sampling, uniform, found = SamplingParams(temperature=1.0), torch.full((3, K), 0.4), []
    for mode in ("eager", "native"):
        head = decoder.with_mode(peagle.load(folder, target, model, model.device), mode)
        drafter, cache = PEagleDrafter(model, head), model.new_cache(3, 32)
        drafter.reset(3, 32)
        drafter.attach(cache)
        model.forward(torch.tensor([t[:11] + [0] * 4 for t in texts]), cache, last=1)
        drafter.propose([text[:7] for text in texts], K, sampling, uniform)
        found.append(drafter.propose([text[:11] for text in texts], K, sampling, uniform).q)
    assert_rounds(*found)


def test_replay_expects_what_sampling_counts(tmp_path):
    """Over many texts, within five standard errors."""
    model = save_models(tmp_path)["target"]
    drafter = peagle_drafter(model)

    def score(pairs: list[tuple[np.ndarray, np.ndarray]], sampling: SamplingParams) -> Any:
        return score_chains(model, drafter.head, pairs, VOCAB, sampling, 3)

    sampling = SamplingParams(max_tokens=24, temperature=1.5)
    assert replay_errors(model, drafter, score, sampling, 3, 200)[0] < 5


def test_a_mask_is_a_pard_token_in_the_layout_of_specforge(target, tmp_path):
    own = ("speculators_model_type", "mask_token_id", "transformer_layer_config")
    native = {name: value for name, value in PEAGLE.items() if name not in own}
    native |= {**PEAGLE["transformer_layer_config"], "pard_token": MASK}
    found, wanted = (
        peagle.check(written_peagle(tmp_path / name, target, content), target)
        for name, content in (("native", native), ("theirs", PEAGLE))
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": V}, V),
        (
            {"transformer_layer_config": LAYER | {"model_type": "llama", "attention_bias": True}},
            "attention_bias",
        ),
        (
            {"transformer_layer_config": LAYER | {"layer_types": ["full_attention", "sliding_attention"]}},
            "layer_types",
        ),
        ({"transformer_layer_config": LAYER | {"model_type": "gemma3"}}, "gemma3"),
        ({"fc_norm": True}, "fc_norm.0"),
    ],
)
def test_a_part_that_is_not_computed_is_refused_by_its_name(target, tmp_path, change, named):
    folder = written_peagle(tmp_path / "head", target, PEAGLE)
    (folder / "config.json").write_text(json.dumps(PEAGLE | change))
    with raises_option(named):
        peagle.check(folder, target)


def test_a_head_is_not_read_as_a_head_of_another_kind(target, tmp_path):
    folder = written_peagle(tmp_path / "head", target, PEAGLE)
    assert hub.head_kind(folder) == "peagle"
    asked = {"target": str(target), "data": "stdlib", "out": tmp_path / "out"}
    for refused, named in (
        (lambda: draftlab.score(drafter=[f"eagle:heads={folder}"], **asked), "peagle"),
        (lambda: open_artifact(folder, Checkpoint(target)), f"peagle:heads={folder}"),
    ):
        with raises_option(named):
            refused()


@pytest.mark.parametrize("fields", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_check_reports_a_norm_that_vllm_does_not_read_in_this_layout(target, tmp_path, fields):
    """update_peagle of vLLM 0.32 (transformers_utils/configs/speculators/algos.py) copies norm_before_fc alone."""
    head = open_checkable(written_peagle(tmp_path / "head", target, PEAGLE | fields), Checkpoint(target))
    (found,) = [each for each in check_files(head, [SERVERS.get("vllm", "--for")]) if each.about == "vllm"]
    assert found.level == ("error" if "fc_norm" in fields else "ok")
