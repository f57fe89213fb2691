"""A family trades depth for width at one budget, and never leaves its source."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab import shipped
from draftlab.errors import UserError
from draftlab.model import families
from draftlab.model.families import TOLERANCE, Budget, BudgetKind, matching_preset, presets
from draftlab.model.shape import Shape, check, check_within

NAMED = presets(shipped.folder("widths"))
LLAMA_7B, TINY = NAMED["llama-7b"], NAMED["tiny-16x256"]


def family(source: Shape, *, budget: float, kind: BudgetKind, depths: list[int], **others: Any) -> list[Shape]:
    return families.family(source, depths, Budget(amount=budget, kind=kind, **others))


@st.composite
def sources(draw) -> Shape:
    """Shapes with groups, odd head counts, an attention wider than the stream and an ffn of any ratio."""
    kv_heads, group = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([8, 12, 64]))
    hidden = head_dim * draw(st.integers(-(-kv_heads * group // head_dim), kv_heads * group))
    return Shape(
        layers=draw(st.integers(1, 12)),
        hidden=hidden,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=draw(st.integers(8, 5 * hidden)),
        vocab=draw(st.integers(50, 5000)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(
    sources(),
    st.sampled_from(["total", "kv"]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([8, 32, 64]),
)
def test_members_hold_the_budget_and_can_be_cut_from_the_source(source, kind, share, multiple_of):
    budget = max(1, round(Budget(amount=1, kind=kind).cost(source) * share))
    depths = [0, *range(1, source.layers + 2)]
    try:
        shapes = family(source, budget=budget, kind=kind, depths=depths, multiple_of=multiple_of)
    except UserError:  # no such cut exists; whether that is so, the enumeration below knows
        return
    for shape in shapes:
        check(shape)
        check_within(shape, source)
        assert abs(Budget(amount=1, kind=kind).cost(shape) - budget) <= TOLERANCE * budget
    assert [shape.layers for shape in shapes] == [n for n in depths if n in {shape.layers for shape in shapes}]


@pytest.fixture(scope="module")
def every_cut() -> dict[int, list[int]]:
    """Return by depth the totals of all cuts of the tiny target: each width, each ffn in steps of 8."""
    cuts = {}
    for layers in (1, 4, 9, 16):
        bases = [
            TINY.model_copy(update={"layers": layers, "hidden": 64 * n, "heads": n, "kv_heads": n})
            for n in (1, 2, 3, 4)
        ]
        cuts[layers] = [base.model_copy(update={"ffn": ffn}).params() for base in bases for ffn in range(8, 689, 8)]
    return cuts


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(200_000, 16_000_000))
def test_a_depth_is_left_out_only_if_no_cut_fits(every_cut, budget):
    fits = [n for n, totals in every_cut.items() if any(abs(t - budget) <= TOLERANCE * budget for t in totals)]
    if fits:
        shapes = family(TINY, budget=budget, kind="total", depths=list(every_cut))
        assert [shape.layers for shape in shapes] == fits
    else:
        with pytest.raises(UserError):
            family(TINY, budget=budget, kind="total", depths=list(every_cut))


def test_kv_decides_the_heads_and_heads_the_width():
    # 4 layers would need 60 heads
    shapes = family(LLAMA_7B, budget=120 * 1024, kind="kv", depths=[4, 12, 24])
    assert [(s.layers, s.heads, s.hidden, s.ffn) for s in shapes] == [
        (12, 20, 2560, 6848),  # 11008 x 2560 / 4096 = 6880, halfway to 6912
        (24, 10, 1280, 3456),
    ]


def test_the_tiny_shape_files_are_a_family():
    shapes = family(TINY, budget=4_470_528, kind="total", depths=[3, 6, 12], multiple_of=8)
    assert shapes == [NAMED["tiny-3x256"], NAMED["tiny-6x192"], NAMED["tiny-12x128"]]


@pytest.mark.parametrize(
    ("source", "layers", "hidden"),
    [
        ("llama-7b", 12, 2560),
        ("llama-7b", 13, 2560),
        ("llama-3.1-8b", 12, 2560),  # another vocabulary
        ("qwen3-8b", 28, 1024),  # qwen3-0.6b ties its head
        ("llama-2-70b", 32, 4096),  # llama-7b has more kv heads, mistral-7b-v0.1 fits
    ],
)
def test_a_preset_counts_where_it_can_be_cut(source, layers, hidden):
    wanted = {("llama-2-70b", 32): "mistral-7b-v0.1", ("llama-7b", 12): "wide-1.3b"}
    found = matching_preset(NAMED[source], layers, hidden, shipped.folder("widths"))
    assert (found and found[0]) == wanted.get((source, layers))


def test_the_papers_sweep_of_350m():
    shapes = family(LLAMA_7B, budget=350_000_000, kind="total", depths=[1, 3, 12, 32])
    # worked out apart from this code, from the parameter formula
    assert [(s.layers, s.hidden, s.ffn) for s in shapes] == [
        (1, 3328, 9280),
        (3, 2304, 6720),
        (12, 1408, 3264),
        (32, 896, 2176),
    ]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([64, 128, 256]), st.integers(2, 12))
def test_every_member_splits_over_the_devices(devices, multiple, layers):
    source = NAMED["llama-3.1-8b"]
    try:
        shapes = family(
            source,
            budget=1_300_000_000,
            kind="total",
            depths=[layers],
            multiple_of=multiple,
            tensor_parallel=devices,
        )
    except UserError:
        return
    assert all(devices in s.tensor_parallel() for s in shapes)


def test_a_latency_budget_is_met_by_whatever_law_is_given():
    shapes = family(TINY, budget=2.0, kind="latency", depths=[1, 4, 8], latency_ms=_made_up_ms)
    assert [s.layers for s in shapes] == [4]  # 1 layer is too fast at any width, 8 too slow
    assert abs(_made_up_ms(shapes[0]) - 2.0) <= 0.02


def _made_up_ms(shape: Shape) -> float:
    return 0.25 * shape.layers + shape.params() / 5e6


def test_shape_files_that_are_named_for_sizes_have_these_sizes():
    named = {name: shape for name, shape in NAMED.items() if re.search(r"\d+x\d+", name)}
    assert named
    assert all(families.shape_name(shape) in name for name, shape in named.items())
