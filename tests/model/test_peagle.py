"""P-EAGLE heads: what speculators computes; what replay says is what is drafted; heads of other kinds are named."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_laws import VOCAB, peagle_drafter, replay_errors, save_models
from errors import raises_option
from head_texts import LAYERS, T, V, W, draft_ids, random_text
from safetensors.torch import save_file
from test_dflash import LAYER

import draftlab
from draftlab.acceptance.chain_logprobs import score_chains
from draftlab.commands import COMMANDS
from draftlab.engine.drafters.peagle import PEagleDrafter
from draftlab.exporting.artifact import check_files, open_artifact, open_checkable
from draftlab.model import checkpoint, eagle_llama, hub, llama, peagle
from draftlab.registry import SERVERS
from draftlab.sampling import SamplingParams

MASK, K = 2, 4
PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "draft_vocab_size": W,
    "eagle_aux_hidden_state_layer_ids": LAYERS, "mask_token_id": MASK, "norm_before_residual": True,
    "transformer_layer_config": LAYER | {"model_type": "llama", "head_dim": 8},
}  # fmt: skip
SLIDING = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 8,
    "use_sliding_window": True,
}
QWEN = {"transformer_layer_config": LAYER | {"head_dim": 8} | SLIDING}


@pytest.fixture(scope="module")
def target(family_dirs: dict[str, Path]) -> Path:
    return family_dirs["llama"]


def written(folder: Path, target: Path, content: dict[str, Any]) -> Path:
    """A head of random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    layers = content.get("transformer_layer_config", content)
    shape = peagle.PEagleShape(
        hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=88, eps=1e-6, context=256, rope={}, vocab=V, draft_vocab=W,
        target_hidden=64, layer_ids=tuple(LAYERS), norm_before_residual=True, layers=2, mask_token_id=MASK,
        norm_before_fc=content.get("norm_before_fc", False), fc_norm=content.get("fc_norm", False),
        qk_norm=layers["model_type"] == "qwen3",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 0.2 * torch.randn(size, generator=generator) for name, size in shape.sizes().items()
    }
    known = torch.zeros(V, dtype=torch.bool)
    known[draft_ids()] = True
    save_file(
        weights | {"d2t": draft_ids() - torch.arange(W), "t2d": known}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"norm_before_fc": True, "norm_output": True}, QWEN | {"fc_norm": True}],
    ids=["plain", "norms", "qwen slides"],
)
def test_speculators_computes_the_same_logits(target, tmp_path, fields):
    """At every anchor and depth of a text."""
    core = pytest.importorskip("speculators.models.peagle.core", reason="make peers installs it")
    content = PEAGLE | fields
    folder, (ids, states) = written(tmp_path / "head", target, content), random_text(T + 1)
    config = core.PEagleSpeculatorConfig.model_validate(content)
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = core.PEagleDraftModel(config).float().eval()
    own = dict(checkpoint.Weights(folder))
    own["embed_tokens.weight"] = checkpoint.Weights(target)["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert set(missing) <= {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert not unexpected
    anchors = torch.cat([torch.arange(T), *[torch.arange(T - depth) for depth in range(1, K)]])
    depths = torch.cat([torch.full((T - depth,), depth) for depth in range(K)])
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: found.append(call[2][0].detach()))
    kept = import_module("speculators.models.peagle.core")
    original, kept.generate_cod_sample_indices = (
        kept.generate_cod_sample_indices,
        lambda **given: (anchors, depths),
    )
    try:
        with torch.no_grad():
            model(
                hidden_states=states, input_ids=ids[:, 1:], document_ids=torch.zeros(1, T, dtype=torch.long),
                verifier_last_hidden_states=torch.zeros(1, T, 64),
                loss_config=import_module("speculators.losses").resolve_loss_config("kl_div", "eager"),
            )  # fmt: skip
    finally:
        kept.generate_cod_sample_indices = original
    hosted = llama.load(target, torch.float32)
    head = peagle.load(folder, target, hosted, hosted.device)
    assert head.mask is not None
    for anchor in range(T):
        count = min(K, T - anchor)
        read = torch.cat([ids[:, 1 : anchor + 2], torch.full((1, count - 1), MASK)], 1)
        masks = head.mask[1].expand(1, count - 1, -1)
        inputs = torch.cat([head.combine(states[:, : anchor + 1]), masks], 1)
        own_logits, _ = head.step(read, inputs, head.new_cache(1, 32), count)
        theirs = torch.stack(
            [found[0][int(((anchors == anchor) & (depths == d)).nonzero())] for d in range(count)]
        )
        torch.testing.assert_close(own_logits[0][:, draft_ids()], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["eager", "native"])
def test_every_mode_drafts_from_the_same_distribution(target, tmp_path, mode):
    """In rows of different lengths beside each other; replay's log-probabilities are those of the draft."""
    folder = written(tmp_path / "head", target, PEAGLE | QWEN)
    model = llama.load(target, torch.float32)
    head = eagle_llama.with_mode(peagle.load(folder, target, model, model.device), mode)
    drafter = PEagleDrafter(model, head)
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (16, 11, 14)]
    drafter.reset(3, 32)
    cache = model.new_cache(3, 32)
    drafter.attach(cache)
    model.forward(torch.tensor([t[:11] + [0] * 5 for t in texts])[:, :15], cache, last=1)
    sampling, uniform = SamplingParams(temperature=1.0), torch.full((3, K), 0.4)
    drafter.propose([text[:7] for text in texts], K, sampling, uniform)
    found = drafter.propose([text[:11] for text in texts], K, sampling, uniform).q
    assert found is not None
    scored = score_chains(
        model, peagle.load(folder, target, model, model.device),
        [(np.array(t[:1]), np.array(t[1:11] + t[:K])) for t in texts],
        VOCAB, sampling, K,
    )  # fmt: skip
    for row, text in enumerate(texts):
        for age in range(K):
            drawn = np.log(max(float(found[row, age, text[age]]), 1e-30))
            expected = max(scored[row].logprobs[10 + age, age], np.log(1e-30))
            np.testing.assert_allclose(drawn, expected, atol=2e-4)


def test_replay_expects_what_sampling_counts(tmp_path):
    """Over many texts, within five standard errors."""
    model = save_models(tmp_path)["target"]
    drafter = peagle_drafter(model)

    def score(pairs: list[tuple[np.ndarray, np.ndarray]], sampling: SamplingParams) -> Any:
        return score_chains(model, drafter.head, pairs, VOCAB, sampling, 3)

    sampling = SamplingParams(max_tokens=24, temperature=1.5)
    assert replay_errors(model, drafter, score, sampling, 3, 200)[0] < 5


def test_a_head_as_typed_through_score_replay_profile_and_predict(target, tmp_path, monkeypatch):
    """In the layout of SpecForge, whose mask is a pard_token."""
    monkeypatch.chdir(tmp_path)
    native = {
        name: v
        for name, v in PEAGLE.items()
        if name not in ("speculators_model_type", "mask_token_id")
    }
    native |= {**native.pop("transformer_layer_config"), "pard_token": MASK}
    head = written(tmp_path / "head", target, native)
    sizes: dict[str, Any] = {
        "data": "stdlib",
        "num_prompts": 4,
        "prompt_tokens": 12,
        "max_new_tokens": 12,
    }
    for mode in ("eager", "native"):
        scored = draftlab.score(
            target=str(target), drafter=["peagle:heads=head"], k="1,4", repeats=1, batch="1,2", mode=mode,
            out=f"score-{mode}", **sizes,
        )  # fmt: skip
        assert all(score.identical for score in scored.scores)
    COMMANDS["outputs build"](use="replay", target=str(target), out=tmp_path / "answers", **sizes)
    COMMANDS["replay"](
        directory=tmp_path / "answers",
        draft=[str(head)],
        target=str(target),
        k="1-4",
        out=tmp_path / "replay",
    )
    COMMANDS["profile"](
        models=[str(target), str(head)],
        k=4,
        context="8,40",
        repeats=3,
        mode="eager",
        threads=1,
        out=tmp_path / "profile",
    )
    predicted = COMMANDS["predict"](
        draft_profile=["profile/head.yaml"],
        target_profile="profile/llama.yaml",
        acceptance=["replay/head"],
        k="1-4",
    )
    assert len(predicted.predictions[0].prediction.rows) == 4


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
            {
                "transformer_layer_config": LAYER
                | {"layer_types": ["full_attention", "sliding_attention"]}
            },
            "layer_types",
        ),
        ({"transformer_layer_config": LAYER | {"model_type": "gemma3"}}, "gemma3"),
        ({"fc_norm": True}, "fc_norm.0"),
    ],
)
def test_a_part_that_is_not_computed_is_refused_by_its_name(target, tmp_path, change, named):
    folder = written(tmp_path / "head", target, PEAGLE)
    (folder / "config.json").write_text(json.dumps(PEAGLE | change))
    with raises_option(named):
        peagle.check(folder, target)


MTP: list[dict[str, Any]] = [
    {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": LAYER},
    {"architectures": ["DeepseekV3ForCausalLMNextN"], "model_type": "deepseek_v3"},
    {"architectures": ["Gemma4MTPModel"], "model_type": "gemma4_mtp"},
]  # fmt: skip


@pytest.mark.parametrize("content", [*MTP, {"speculators_model_type": "xpress"}])
def test_a_head_of_a_kind_that_is_not_computed_is_named_by_every_command(
    target, tmp_path, monkeypatch, content
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file({"mtp.fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    kind, name, on = (
        "MTP head" if content in MTP else "xpress head",
        str(folder),
        {"target": str(target)},
    )
    for refused in (
        lambda: COMMANDS["check"](draft=name, **on),
        lambda: COMMANDS["export"](draft=name, out="out", **on),
        lambda: draftlab.score(
            drafter=[f"eagle:heads={name}"], k="2", data="stdlib", out="out", **on
        ),
        lambda: draftlab.score(draft=[name], k="2", data="stdlib", out="out", **on),
        lambda: COMMANDS["profile"](models=[str(target), name], out="out"),
    ):
        with raises_option(kind) as error:
            refused()
        assert "\n" not in str(error.value)


def test_a_head_is_not_read_as_a_head_of_another_kind(target, tmp_path):
    folder = written(tmp_path / "head", target, PEAGLE)
    assert hub.head_kind(folder) == "peagle"
    with raises_option("peagle"):
        draftlab.score(
            target=str(target),
            drafter=[f"eagle:heads={folder}"],
            k="2",
            data="stdlib",
            out=str(tmp_path / "out"),
        )
    with raises_option(f"peagle:heads={folder}"):
        open_artifact(folder, target)


@pytest.mark.parametrize("fields", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_check_reports_a_norm_that_vllm_does_not_read_in_this_layout(target, tmp_path, fields):
    """update_peagle of vLLM 0.32 (transformers_utils/configs/speculators/algos.py) copies norm_before_fc alone."""
    head = open_checkable(written(tmp_path / "head", target, PEAGLE | fields), target)
    (found,) = [
        each for each in check_files(head, [SERVERS.get("vllm", "--for")]) if each.about == "vllm"
    ]
    assert found.level == ("error" if "fc_norm" in fields else "ok")
