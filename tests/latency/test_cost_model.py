"""Costs agree with what was published, curves stay inside what was measured, and files say what is wrong with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
import yaml
from helpers.errors import raises_option
from helpers.latencies import profile_of

from draftlab import shipped
from draftlab.commands import PREDICT
from draftlab.errors import UserError
from draftlab.heads.eagle3.layout import HeadShape
from draftlab.latency.cost_model import (
    CostModel,
    Profile,
    alpha_for,
    break_even_length,
    closed_form_speedup,
    exact,
    expected_tokens,
    read_profile,
    write_profile,
)
from draftlab.latency.roofline import (
    Device,
    MLPs,
    ModelSizes,
    parse_profile,
    read_sizes,
    roofline_profile,
)
from draftlab.model.families import presets
from draftlab.model.shape import Shape
from draftlab.reading import read_model
from draftlab.results.score import Latency


@pytest.fixture
def profile() -> Profile:
    """T(w, B, L) = w + 10 B + L / 16, 1 ms faster after each pass of the same model: interpolation is exact."""
    return profile_of(lambda w, b, c, before: w + 10 * b + c / 16 - before)


@pytest.mark.parametrize(("c", "k"), [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_best_k_is_that_of_online_speculative_decodings_cost_model(c, k):
    assert max(range(1, 33), key=lambda k: closed_form_speedup(expected_tokens(0.6, k), k, c)) == k


def test_break_even_beta_and_experts_are_those_that_were_published():
    """Both from the review that papers.md cites in section 1.7."""
    length = expected_tokens(2 / 3, 5)
    assert closed_form_speedup(length, 5, c=0.01, beta=2.69) == pytest.approx(1, abs=2e-3)
    assert break_even_length(5, 0.01, 2.69) == pytest.approx(length, abs=5e-3)
    mixtral = MLPs(experts=8, active=2)
    assert mixtral.expected_active(1) == 2
    assert mixtral.expected_active(5) == pytest.approx(6.1, abs=0.05)
    assert mixtral.expected_active(5) / mixtral.expected_active(1) == pytest.approx(3.05, abs=0.01)


@pytest.mark.parametrize(("alpha", "k", "length"), [(0.5, 1, 1.5), (0.7, 4, 2.77), (0.8, 6, 3.95), (0.9, 8, 6.13)])
def test_expected_length_and_its_inverse(alpha, k, length):
    assert expected_tokens(alpha, k) == pytest.approx(length, abs=5e-3)
    assert alpha_for(expected_tokens(alpha, k), k) == pytest.approx(alpha)


def test_curves_are_linear_between_their_points(profile):
    cost = CostModel.of(profile)
    contexts = np.array([16, 20, 64])
    assert cost.forward_ms(3, 2, contexts) == pytest.approx(3 + 20 + contexts / 16)
    assert cost.steady_ms(3, contexts) == pytest.approx(1 + 30 + contexts / 16 - 2)
    assert cost.warmup_ms(3, contexts) == pytest.approx(np.array([[2.0] * 3, [1.0] * 3]))
    assert cost.prefill_ms(np.array([40])) == pytest.approx([7])
    assert cost.host_ms(3) == pytest.approx(0.3)


@pytest.mark.parametrize(("width", "batch", "context"), [(6, 1, 16), (1, 5, 16), (1, 1, 15), (1, 1, 65)])
def test_nothing_is_extrapolated_unasked(profile, width, batch, context):
    with raises_option("to"):
        CostModel.of(profile).forward_ms(width, batch, np.array([context]))


def test_extrapolation_continues_widths_and_contexts_but_no_batch(profile):
    cost = CostModel.of(profile, extrapolate=True)
    assert cost.forward_ms(8, 1, np.array([96])) == pytest.approx([8 + 10 + 6])
    ranges = {"width": (1, 8), "context": (8, 64), "prompt": (16, 64)}
    assert [len(cost.beyond(name, *ends)) for name, ends in ranges.items()] == [1, 1, 0]
    with raises_option("5"):
        cost.forward_ms(1, 5, np.array([16]))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # milliseconds at prompt lengths 16 and 64 -> milliseconds at 8 and 128
        ((2.0, 4.0), (2 - 8 / 24, 4 + 64 / 24)),
        ((4.0, 3.0), (4.0, 3.0)),  # by noise, the longer prompt took less time
        ((1.0, 9.0), (0.5, 18.0)),  # 9 times the time for 4 times the tokens
    ],
)
def test_extrapolated_times_grow_with_the_tokens_and_no_faster(profile, times, expected):
    points = [Latency(width=width, **exact(ms)) for width, ms in zip((16, 64), times, strict=True)]
    cost = CostModel.of(profile.model_copy(update={"prefill": points}), extrapolate=True)
    assert cost.prefill_ms(np.array([8, 128])) == pytest.approx(expected)
    assert cost.prefill_ms(np.array([16, 64])) == pytest.approx(times)


def test_a_profile_survives_its_file_and_a_folder_of_two_is_none(profile, tmp_path):
    write_profile(profile, tmp_path / "a.yaml")
    assert read_profile(tmp_path / "a.yaml") == read_profile(tmp_path) == profile
    write_profile(profile, tmp_path / "b.yaml")
    with raises_option("a.yaml", "b.yaml"):
        read_profile(tmp_path)


@pytest.mark.parametrize(("grid", "hole"), [("forward", -1), ("steady", 0)])
def test_a_grid_with_a_hole_is_refused(profile, tmp_path, grid, hole):
    fields = profile.model_dump()
    del fields[grid][hole]
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(fields))
    with raises_option(grid):
        read_profile(tmp_path / "m.yaml")


def test_points_that_contradict_themselves_are_refused(profile, tmp_path):
    fields = profile.model_dump()
    fields["prefill"][0]["median_ms"] = 1e-9
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(fields))
    with raises_option("m.yaml"):
        read_profile(tmp_path / "m.yaml")


def device_of(name: str) -> Device:
    return read_model(Device, shipped.folder("profiles") / f"{name}.yaml")


def computed(spec: str, width: int = 1, context: int = 0) -> float:
    """Return the milliseconds of a pass of a computed profile."""
    cost = CostModel.of(parse_profile(spec, widths=sorted({1, width}), batches=[1], longest=200))
    return float(cost.forward_ms(width, 1, np.array(context)))


@pytest.mark.parametrize(
    ("spec", "tokens_per_second", "within"),
    [
        ("llama-7b@a100-80gb,graphs,bfloat16", 104.9, 0.01),  # took part in the fit
        ("llama-2-70b@4xa100-80gb,graphs,bfloat16", 38.01, 0.04),  # did not
    ],
)
def test_computed_passes_agree_with_gpt_fast(spec, tokens_per_second, within):
    """README of pytorch-labs/gpt-fast, 0f925b5: A100-80GB, batch 1, prompts of 5 tokens."""
    assert 1e3 / computed(spec) == pytest.approx(tokens_per_second, rel=within)


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "ms"),
    [(12, 768, 2048, 10.1), (24, 1024, 2730, 14.7), (24, 2048, 5461, 14.0)],
)
def test_computed_eager_passes_agree_with_opt_under_deepspeed(layers, hidden, ffn, ms):
    """OPT-125M, 350M and 1.3B of arXiv 2603.11053; OPT's two MLP matrices counted as LLaMA's three."""
    shape = Shape(
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=hidden // 64,
        head_dim=64,
        ffn=ffn,
        vocab=50272,
        tied=True,
    )
    found = roofline_profile(
        ModelSizes(shape=shape),
        device_of("a100-80gb"),
        "eager",
        name="opt",
        dtype="float16",
        widths=[1],
        batches=[1],
        contexts=[0, 128],
    )
    assert found.forward[0].median_ms == pytest.approx(ms, rel=0.05)


def test_a_cached_token_costs_the_reading_of_its_keys_and_values():
    shape, device = presets(shipped.folder("widths"))["llama-7b"], device_of("a100-80gb")
    near, far = (computed("llama-7b@a100-80gb,graphs", context=at) for at in (0, 200))
    read_ms = 200 * shape.kv_bytes_per_token(2) / (device.bandwidth_gbs * 1e6)
    assert far - near == pytest.approx(read_ms)


def test_a_head_reads_all_it_is_made_of_at_first_and_then_all_but_what_joins_the_states():
    """The time is that of reading a head of LLaMA-65B at the bandwidth, plus a layer's time."""
    shape, device = presets(shipped.folder("widths"))["llama-65b"], device_of("h200")
    head = HeadShape(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        eps=1e-6,
        context=2048,
        rope={},
        vocab=shape.vocab,
        draft_vocab=8000,
        target_hidden=shape.hidden,
        layer_ids=(2, 40, 77),
        norm_before_residual=False,
    )
    found = parse_profile("llama-65b@h200,graphs,eagle=8000", widths=[1], batches=[1], longest=64)
    assert found.drafter == "eagle"
    assert found.shape is None
    joining = 3 * shape.hidden**2
    for points, params in ((found.forward, head.params()), (found.steady, head.params() - joining)):
        first = next(point for point in points if point.context == 0)
        cached = shape.model_copy(update={"layers": 1}).kv_bytes_per_token(2)
        expected = (2 * params + cached) / (device.bandwidth_gbs * 1e6) + device.layer_ms
        # norms, some 1e-5 of it, are counted differently
        assert first.median_ms == pytest.approx(expected, rel=1e-4)


def test_a_computed_head_is_predicted_as_a_head():
    """Its steps read the states of the tokens accepted last at once, and no token twice."""
    head, target = "llama-65b@a100-80gb,graphs,eagle=32000", "llama-65b@4xa100-80gb,graphs"
    predicted = PREDICT(draft_profile=[head], target_profile=target, acceptance=["0.6"]).result
    at_one = next(row for row in predicted[0].prediction.rows if row.k == 1)
    draft = parse_profile(head, widths=[1], batches=[1], longest=400)
    first = next(p.median_ms for p in draft.forward if p.context == 0)
    per_step = at_one.shares["draft"] * 1e3 * at_one.tokens_per_pass.value / at_one.tokens_per_second
    assert per_step == pytest.approx(first, rel=0.03)


def test_wide_passes_turn_from_reading_to_computing():
    assert computed("llama-65b@h200,graphs", 9) / computed("llama-65b@h200,graphs", 1) < 1.01
    wide = computed("llama-65b@4xa100-80gb,graphs", 1024)
    assert wide > 2 * 65e9 * 1024 / (4 * 312e12) * 1e3


CONFIGS = {
    "mixtral-8x7b": hf.MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt-oss-20b": hf.GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "glm-4.5-air": hf.Glm4MoeConfig(
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        n_routed_experts=128,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        attention_bias=True,
    ),
    "opt-66b": hf.OPTConfig(
        vocab_size=50272,
        hidden_size=9216,
        ffn_dim=36864,
        num_hidden_layers=64,
        num_attention_heads=72,
        word_embed_proj_dim=9216,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_targets_that_are_no_llamas_have_the_weights_that_transformers_builds(name):
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(CONFIGS[name])
    sizes = read_sizes(shipped.folder("targets") / f"{name}.yaml")
    routed = sum(p.numel() for at, p in model.named_parameters() if ".experts." in at)
    built = sum(p.numel() for p in model.parameters())
    looked_up = 0 if sizes.shape.tied else sizes.shape.vocab * sizes.shape.hidden
    mlps = sizes.mlps
    # routers, norms and learnt positions are not counted
    assert sizes.params() + looked_up == pytest.approx(built, rel=2e-3)
    active = built - looked_up - routed * (1 - mlps.active / mlps.experts)
    assert sizes.params(mlps.active) == pytest.approx(active, rel=1e-2)


def test_a_curve_of_experts_makes_a_wide_pass_cheaper_than_chance(tmp_path):
    """Tokens of one text share experts: with a measured curve fewer are read than if each chose at random."""
    text = (shipped.folder("targets") / "mixtral-8x7b.yaml").read_text()
    file = tmp_path / "measured.yaml"
    file.write_text(text.replace("active: 2", "active: 2, curve: [[1, 2], [5, 4]]"))
    assert read_sizes(file).mlps.expected_active(3) == 3
    chance = computed("mixtral-8x7b@h200,graphs", 5)
    assert computed(f"{file}@h200,graphs", 5) < 0.75 * chance


# config.json of meta-llama/Llama-3.1-8B, and what differs in that of a head for it
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(name: str, **changes: object) -> None:
    Path(name).mkdir()
    (Path(name) / "config.json").write_text(json.dumps(LLAMA_8B | changes))


def speedups(draft: str, target: str) -> dict[int, float]:
    predicted = PREDICT(draft_profile=[draft], target_profile=target, acceptance=["0.7"]).result
    return {row.k: row.speedup.value for row in predicted[0].prediction.rows}


@pytest.mark.parametrize(
    ("changes", "draft", "shipped_draft"),
    [
        ({}, "./model@h100,graphs", "llama-3.1-8b@h100,graphs"),
        ({}, "./model@h100,graphs,int4,eagle=32000", "llama-3.1-8b@h100,graphs,int4,eagle=32000"),
        (HEAD, "./model@h100,graphs", "llama-3.1-8b@h100,graphs,eagle=32000"),
    ],
)
def test_a_checkpoint_without_weights_is_priced_as_its_shape(changes, draft, shipped_draft, folder):
    write_config("model", **changes)
    target = "llama-3.1-8b@h100,graphs"
    assert speedups(draft, target) == speedups(shipped_draft, target)


def test_embedded_models_and_targets_are_priced_by_name(folder):
    write_config("target@main")
    by_name = speedups("tiny@h100,graphs", "target@main@h100,graphs")
    assert by_name == speedups("tiny@h100,graphs", "llama-3.1-8b@h100,graphs")
    assert max(by_name.values()) > 1


def test_a_head_that_reads_more_layers_costs_more_at_first(folder):
    write_config("three", **HEAD)
    write_config("four", **HEAD, eagle_aux_hidden_state_layer_ids=[2, 9, 16, 29])
    three, four = (speedups(f"{name}@h100,graphs", "llama-3.1-8b@h100,graphs") for name in ("three", "four"))
    assert all(four[k] < three[k] for k in three)


@pytest.mark.parametrize(
    ("changes", "draft", "named"),
    [
        ({}, "model", "model@"),
        ({}, "model@h100", "graphs"),
        ({}, "modal@h100,graphs", "modal"),
        ({}, "no/such/folder@h100,graphs", "no/such/folder"),
        (HEAD, "model@h100,graphs,eagle=32000", "eagle=32000"),
        (HEAD | {"dflash_config": {"target_layer_ids": [1]}}, "model@h100,graphs", "draftlab profile"),
        ({"architectures": ["DeepseekMTP"]}, "model@h100,graphs", "mtp"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "model@h100,graphs", "int4"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "model@h100,graphs", "shape file"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "model@h100,graphs", "Bert"),
        ({"hidden_size": "wide"}, "model@h100,graphs", "hidden_size"),
    ],
)
def test_a_model_without_a_computed_profile_is_refused_in_a_line(changes, draft, named, folder):
    write_config("model", **changes)
    with raises_option("--draft-profile", named) as caught:
        speedups(draft, "llama-3.1-8b@h100,graphs")
    assert "\n" not in str(caught.value)


def test_a_head_is_no_target(folder):
    write_config("head", **HEAD)
    for target in ("head@h100,graphs", "llama-7b@h100,graphs,eagle=32000"):
        with raises_option("--target-profile", target):
            speedups("llama-3.1-8b@h100,graphs", target)


@pytest.mark.parametrize(
    "mlps",
    [
        None,
        "{experts: 2, active: 3}",
        "{dense_layers: 1}",
        "{experts: 4, curve: [[2, 1], [1, 2]]}",
        "{experts: 8, curve: [[1, 4], [8, 2]]}",
    ],
)
def test_wrong_mlps_are_refused(mlps, tmp_path):
    file = tmp_path / "wrong.yaml"
    text = (shipped.folder("widths") / "llama-3.2-1b.yaml").read_text()
    file.write_text(text.replace("kv_heads: 8", "kv_heads: 7") if mlps is None else f"{text}mlps: {mlps}\n")
    with pytest.raises(UserError, match=r"wrong.yaml"):
        parse_profile(f"{file}@h100,graphs", widths=[1], batches=[1], longest=64)


def test_devices_are_their_data_sheets_at_the_a100s_share_of_bandwidth():
    """GB, GB/s and dense bf16 TFLOPS. Of the A100's 2,039 GB/s gpt-fast gets 1,663; int4 is computed in bf16."""
    sheets = {
        "l4": (24, 300, 121),
        "a10": (24, 600, 125),
        "l40s": (48, 864, 362),
        "rtx-4090": (24, 1008, 165.2),
        "a100-80gb": (80, 2039, 312),
        "h100": (80, 3350, 989),
        "h200": (141, 4800, 989),
        "b200": (180, 7672, 2250),
    }
    for name, (gigabytes, gigabytes_per_second, teraflops) in sheets.items():
        found = device_of(name)
        assert found.memory_gb == gigabytes
        assert found.bandwidth_gbs == pytest.approx(gigabytes_per_second * 1663 / 2039, rel=2e-3)
        assert found.tflops["bfloat16"] == found.tflops["int4"] == teraflops
    # 34 GB at 2,730 GB/s, and 80 layers of 0.05 ms
    assert 10 < computed("llama-65b@h100,graphs,int4") < 20
    assert computed("llama-65b@h100,graphs,float8") < computed("llama-65b@h200,graphs")


def test_a_device_whose_passes_never_end_gives_no_profile(tmp_path):
    fields = yaml.safe_load((shipped.folder("profiles") / "a100-80gb.yaml").read_text())
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(fields | {"bandwidth_gbs": 1e-310}))
    with raises_option("device"):
        parse_profile(f"tiny-16x256@{tmp_path}/slow.yaml,graphs", widths=[1], batches=[1], longest=8)
