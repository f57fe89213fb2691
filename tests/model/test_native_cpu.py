"""The compiled pass computes what llama.py computes, and the same bits at every width and in every batch."""

import ctypes
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.builders import FAMILIES, OTHER_BLOCKS, assert_rounds, build
from helpers.errors import raises_option
from helpers.prompts import PROMPT
from transformers import AutoModelForCausalLM

from draftlab.model import llama, native_cpu
from draftlab.model.decoder import Tree
from draftlab.model.native_cpu import NativeLlama
from draftlab.model.processor import instructions, read_cpuinfo

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
KINDS = [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float32, True),
    (torch.bfloat16, True),
]


def passes(model, rows: list[list[int]], widths: list[int]) -> torch.Tensor:
    """Logits of texts fed in passes of these widths, [B, S, V]."""
    ids = torch.tensor(rows)
    cache = model.new_cache(len(rows), ids.shape[1])
    return torch.cat([model.forward(part, cache) for part in ids.split(widths, dim=1)], 1).float()


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_BLOCKS])
def test_logits_equal_transformers(family, family_dirs):
    theirs = AutoModelForCausalLM.from_pretrained(family_dirs[family], dtype=torch.float32)
    ours = NativeLlama(llama.load(family_dirs[family], torch.float32))
    with torch.inference_mode():
        found = passes(ours, IDS.tolist(), [1, 2, 7, 1, 8, 5])
        assert_rounds(found, theirs(IDS).logits)


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    """Models of bfloat16 weights: one of usual sizes, two of which no axis fills a vector or a tile, and one whose down
    projection reads so many inputs that passes over 4 to 12 tokens take them in chunks.
    """
    models = {
        "usual": build("qwen3"),
        "odd": build("qwen3", hidden_size=50, intermediate_size=77, head_dim=34, vocab_size=301),
        "odd with biases": build(
            "llama_biases",
            hidden_size=39,
            intermediate_size=131,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=70,
        ),
        "many inputs": build(
            "llama_biases",
            hidden_size=51,
            intermediate_size=4130,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=34,
        ),
    }
    saved = {name: tmp_path_factory.mktemp("native") for name in models}
    for name, model in models.items():
        model.bfloat16().save_pretrained(saved[name])
    return saved


SIZES = pytest.mark.parametrize("sizes", ["usual", "odd", "odd with biases", "many inputs"])


@SIZES
def test_bfloat16_weights_are_computed_with_more_exactly_than_torch_does(sizes, directories):
    """Instructions that multiply bfloat16 need rounded activations."""
    half, full = (llama.load(directories[sizes], dtype) for dtype in (torch.bfloat16, torch.float32))
    rounds = "avx512_bf16" in instructions(read_cpuinfo())
    truth = passes(full, IDS.tolist(), [1] * 24)
    ours, torchs = ((passes(m, IDS.tolist(), [1] * 24) - truth).abs().mean() for m in (NativeLlama(half), half))
    assert ours < (0.7 if rounds else 0.5) * torchs


@SIZES
def test_bits_depend_neither_on_width_nor_on_other_rows(sizes, directories):
    is_exact(directories[sizes], lambda model, widths: passes(model, IDS[:1].tolist(), widths))
    is_exact(directories[sizes], lambda model, widths: passes(model, IDS.tolist(), widths)[:1])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no x86-64")
@pytest.mark.parametrize("level", ["x86-64", "znver3"])
def test_without_avx512_it_is_as_exact(level, family_dirs, monkeypatch):
    """Built for the first x86-64, with vectors of 4; and with AVX2, as GCC likes it on a Zen 3.

    There GCC leaves some sums of products unfused, and which ones depends on the width of a pass, if it may choose.
    """
    if level != "x86-64" and "avx2" not in instructions(read_cpuinfo()):
        pytest.skip("no AVX2")
    flags = "-march=x86-64-v3 -mtune=znver3" if level == "znver3" else f"-march={level}"
    monkeypatch.setattr(native_cpu, "FLAGS", (*native_cpu.FLAGS, *flags.split()))
    monkeypatch.setattr(native_cpu, "TUNED", flags.split()[-1])
    native_cpu.library.cache_clear()
    try:
        is_exact(family_dirs["qwen3"], lambda model, widths: passes(model, IDS[:1].tolist(), widths))
    finally:
        native_cpu.library.cache_clear()


def is_exact(directory: Path, run: Callable[[NativeLlama, list[int]], torch.Tensor]) -> None:
    """Logits are torch's, and every width gives the same bits. run: logits of the first text in passes of widths."""
    for dtype, int8 in KINDS:
        model = llama.load(directory, dtype)
        one = run(NativeLlama(model, int8), [1] * 24)
        for widths in ([3, 1, 8, 2, 5, 5], [7, 6, 11], [24]):
            assert torch.equal(run(NativeLlama(model, int8), widths), one)
        if (dtype, int8) == (torch.float32, False):
            assert_rounds(one, passes(model, IDS[:1].tolist(), [24]))


def test_on_arm_it_is_as_exact(family_dirs, tmp_path):
    """Cross-compiled; run by an emulator, where one is installed."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None:
        pytest.skip("no aarch64-linux-gnu-g++")
    program, flags = (
        tmp_path / "driver",
        [flag for flag in native_cpu.FLAGS if flag not in ("-shared", "-fPIC")],
    )
    driver = Path(__file__).parents[1].joinpath("helpers/native_driver.cpp")
    subprocess.run([compiler, *flags, "-static", str(driver), "-o", str(program)], check=True)
    if emulator is None:
        pytest.skip("compiled; no qemu-aarch64-static to run it")

    def run(model: NativeLlama, widths: list[int]) -> torch.Tensor:
        told = described(model, IDS[0].tolist(), widths)
        done = subprocess.run([emulator, str(program)], input=told, stdout=subprocess.PIPE, check=True)
        return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(1, 24, -1)

    is_exact(family_dirs["qwen3"], run)


def described(model: NativeLlama, ids: list[int], widths: list[int]) -> bytes:
    """Return a model and a text as native_driver.cpp reads them."""
    held = [(t.data_ptr(), t.nbytes) for t in model._tensors]
    tensors = b"".join(struct.pack("<QQ", *place) + ctypes.string_at(*place) for place in held)
    told = model._model
    layers = bytes(ctypes.cast(told.layer, ctypes.POINTER(native_cpu._Layer * told.layers)).contents)
    kind = KINDS.index((model.embed.dtype, model.int8))
    head = struct.pack(f"<3i{len(widths)}i", kind, len(ids), len(widths), *widths)
    text = struct.pack(f"<{len(ids)}q", *ids)
    return struct.pack("<q", len(held)) + tensors + bytes(told) + layers + head + text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bits(family_dirs, dtype):
    model = NativeLlama(llama.load(family_dirs["llama"], dtype))
    alone = passes(model, IDS.tolist(), [4] * 6)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert torch.equal(passes(model, IDS.tolist(), [4] * 6), alone)
    finally:
        torch.set_num_threads(before)


def test_int8_is_the_model_with_its_matrices_rounded_by_output(family_dirs):
    """Weights are rounded to 127 steps of each output's largest weight; embedding and norms stay as they are."""
    rounded = AutoModelForCausalLM.from_pretrained(family_dirs["qwen2"], dtype=torch.float32)
    with torch.no_grad():
        for name, weights in rounded.named_parameters():
            if weights.ndim == 2 and "embed" not in name:
                step = weights.abs().amax(1, keepdim=True) / 127
                weights.copy_((weights / step).round() * step)
        ours = passes(
            NativeLlama(llama.load(family_dirs["qwen2"], torch.float32), int8=True),
            IDS.tolist(),
            [5, 5, 6, 8],
        )
        assert_rounds(ours, rounded(IDS).logits)


def test_trees_behind_rows_of_different_lengths_are_llamas(family_dirs):
    model = llama.load(family_dirs["llama_biases"], torch.float32)
    found = []
    for each in (model, NativeLlama(model)):
        cache = each.new_cache(2, 40)
        each.forward(IDS[:, :12], cache)
        cache.used = [12, 7]
        found.append(each.forward(IDS[:, 12:20], cache, last=6, tree=Tree.from_parents((0, 0, 1, 2, 2, 5, 0))))
        assert cache.used == [20, 15]
        found.append(cache.keys[:, 0, :, :20])
    assert_rounds(found[0], found[2])
    assert_rounds(found[1], found[3])


def test_ids_of_any_integer_type_are_read(family_dirs):
    model = NativeLlama(llama.load(family_dirs["llama"], torch.float32))
    ids = torch.tensor([[7, 1, 300]])
    expected = model.forward(ids, model.new_cache(1, 8))
    assert torch.equal(model.forward(ids.int(), model.new_cache(1, 8)), expected)


@pytest.mark.parametrize(("dtype", "int8"), KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_path_of_a_tree_has_the_bits_of_a_chain(dtype, int8, family, family_dirs):
    native = NativeLlama(llama.load(family_dirs[family], dtype), int8=int8)
    text, tree = (PROMPT * 20)[:37], (PROMPT * 20)[37:45]
    parents = (0, 1, 0, 2, 1, 3, 5)  # of tokens 1 to 7; tokens 0 to 2 are a chain
    cache = native.new_cache(1, 64)
    native.forward(torch.tensor([text]), cache)
    found = native.forward(torch.tensor([tree]), cache, tree=Tree.from_parents(parents))
    for token in range(len(tree)):
        path = [token]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        expected = passes(native, [text + [tree[i] for i in path]], [37, len(path)])
        assert torch.equal(found[0, token], expected[0, -1])
    assert cache.used == [45]
    kept = [0, 3, 6]  # a path: the keys of its tokens are those of the chain
    cache.keep(0, 37, kept)
    whole = native.new_cache(1, 64)
    native.forward(torch.tensor([text]), whole)
    native.forward(torch.tensor([[tree[i] for i in kept]]), whole)
    assert torch.equal(cache.keys[..., :40, :], whole.keys[..., :40, :])


def test_wide_passes_go_on_where_narrow_ones_stopped(family_dirs):
    model = llama.load(family_dirs["mistral"], torch.float32)
    text = [PROMPT * 22]
    widths = [3, native_cpu.WIDE + 10, 13]
    assert_rounds(passes(NativeLlama(model), text, widths), passes(model, text, widths))


@pytest.mark.parametrize(("dtype", "int8"), KINDS)
def test_a_pass_over_several_blocks_of_tokens_has_the_bits_of_narrow_passes(dtype, int8, family_dirs):
    native = NativeLlama(llama.load(family_dirs["llama"], dtype), int8=int8)
    native.any_width = True
    text = [(PROMPT * 40)[:250]]
    whole, narrow = (passes(native, text, widths) for widths in ([250], [100, 90, 7, 53]))
    assert torch.equal(whole, narrow)


def test_what_cannot_be_compiled_is_said(family_dirs, monkeypatch):
    with raises_option("float32", "bfloat16", "float16"):
        NativeLlama(llama.load(family_dirs["llama"], torch.float16))
    model = llama.load(family_dirs["llama"], torch.float32)
    with pytest.raises(ValueError, match=r"24 .* 20"):
        NativeLlama(model).forward(IDS, model.new_cache(2, 20))
    native_cpu.library.cache_clear()
    monkeypatch.setenv("PATH", "")
    with raises_option("clang", "--mode"):
        NativeLlama(model)
