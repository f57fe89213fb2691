"""The compiled pass refuses whatever would make it read or write beyond a tensor, and goes on afterwards."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch
from helpers.builders import build
from helpers.head_texts import random_weights
from torch import Tensor

from draftlab.heads.eagle3 import layout
from draftlab.heads.eagle3.decoder import EagleLlama, NativeEagle
from draftlab.heads.eagle3.layout import Head
from draftlab.model import llama
from draftlab.model.decoder import Tree
from draftlab.model.llama import Cache, LayerStates, Llama
from draftlab.model.native_cpu import NativeLlama

B, T, CAPACITY, USED = 2, 7, 40, 11
PARENTS = (0, 0, 1, 2, 2, 5)
INT64 = 1 << 63


@dataclass
class Call:
    """The arguments of a pass. states: None for a model that reads none."""

    model: NativeLlama
    ids: Tensor
    cache: Cache
    last: int
    tree: Tree
    states: Tensor | None

    def run(self) -> Tensor:
        return self.model.narrow_pass(self.ids, self.cache, self.last, self.tree, self.states)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, NativeLlama]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("target", "head")}
    build("llama").save_pretrained(folders["target"])
    target = llama.load(folders["target"], torch.float32)
    config = layout.head_config(folders["target"], None, 120)
    head = Head(
        config=config,
        weights=random_weights(config.sizes(), 0),
        ids=torch.arange(0, 240, 2),
        embedding=None,
    )
    return {
        "float32": NativeLlama(target),
        "bfloat16": NativeLlama(llama.load(folders["target"], torch.bfloat16)),
        "int8": NativeLlama(target, int8=True),
        "head": NativeEagle(EagleLlama(head, target.embed, folders["head"])),
    }


def right_call(model: NativeLlama) -> Call:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab, (B, T), generator=rng)
    cache = model.new_cache(B, CAPACITY)
    for part in (cache.keys, cache.values):
        part.normal_(generator=rng)
    cache.used = [USED, USED - 3]
    states = None
    if isinstance(model, NativeEagle):
        states = torch.randn(B, T, model.shape.hidden, generator=rng)
    else:
        cache.layer_states = model.new_layer_states(cache, (0, 1))
    return Call(model, ids, cache, 3, Tree.from_parents(PARENTS), states)


# Functions that make one thing wrong in a right call. draw: Returns a number between two bounds.
Draw = Callable[[int, int], int]
WRONG: dict[str, Callable[[Call, Draw], None]] = {}


def wrong(change: Callable[[Call, Draw], None]) -> Callable[[Call, Draw], None]:
    WRONG[change.__name__] = change
    return change


def outside(draw: Draw, size: int) -> int:
    """Return a number below 0 or not below `size`."""
    return draw(-INT64, -1) if draw(0, 1) else draw(size, INT64 - 1)


def other_size(values: Tensor, draw: Draw, dims: int | None = None) -> Tensor:
    """Return the tensor with one row less, or one more, in one of its first dimensions."""
    dim = draw(0, (dims or values.ndim) - 1)
    if draw(0, 1):
        return torch.cat([values, values.narrow(dim, 0, 1)], dim)
    return values.narrow(dim, 1, values.shape[dim] - 1).contiguous()


def strided(values: Tensor) -> Tensor:
    """Return the same values with other strides."""
    return values.transpose(-1, -2).contiguous().transpose(-1, -2)


OTHER = [torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]


def other_dtype(values: Tensor, draw: Draw) -> Tensor:
    return values.to(OTHER[draw(0, len(OTHER) - 1)])


@wrong
def an_id(call: Call, draw: Draw) -> None:
    call.ids[draw(0, B - 1), draw(0, T - 1)] = outside(draw, call.model.vocab)


@wrong
def type_of_ids(call: Call, draw: Draw) -> None:
    call.ids = call.ids.to([torch.float32, torch.bool, torch.complex64][draw(0, 2)])


@wrong
def size_of_ids(call: Call, draw: Draw) -> None:
    call.ids = [call.ids[0], call.ids[None], call.ids[:, :0], call.ids[:0], call.ids[:1]][draw(0, 4)]


@wrong
def device_of_ids(call: Call, draw: Draw) -> None:
    call.ids = call.ids.to("meta")


@wrong
def a_length(call: Call, draw: Draw) -> None:
    # also beyond 64 bits, which ctypes would cut without a word
    far = draw(CAPACITY - T + 1, 1 << 70)
    call.cache.used[draw(0, B - 1)] = draw(-(1 << 70), -1) if draw(0, 1) else far


@wrong
def a_length_beyond_the_context(call: Call, draw: Draw) -> None:
    context = call.model.context
    keys = call.cache.keys
    long = keys.new_zeros(*keys.shape[:3], context + 2 * T, keys.shape[4])
    call.cache = Cache(long, long.clone(), [USED, draw(context - T + 1, context)])


@wrong
def number_of_lengths(call: Call, draw: Draw) -> None:
    call.cache.used = [USED] * [1, 3][draw(0, 1)]


@wrong
def last(call: Call, draw: Draw) -> None:
    call.last = draw(-INT64, -1) if draw(0, 1) else draw(T + 1, INT64 - 1)


@wrong
def a_cache(call: Call, draw: Draw) -> None:
    name = ["keys", "values"][draw(0, 1)]
    values = getattr(call.cache, name)
    setattr(
        call.cache,
        name,
        [other_size(values, draw), other_dtype(values, draw), strided(values)][draw(0, 2)],
    )


@wrong
def rows_of_the_cache(call: Call, draw: Draw) -> None:
    call.cache = call.cache.rows(torch.tensor([True, False]))
    call.cache.used = [USED] * B


@wrong
def a_depth(call: Call, draw: Draw) -> None:
    depth = call.tree.depth.clone()
    depth[draw(0, T - 1)] += draw(1, INT64 - T) * [1, -1][draw(0, 1)]
    call.tree = replace(call.tree, depth=depth)


@wrong
def a_bit_of_the_mask(call: Call, draw: Draw) -> None:
    mask = call.tree.mask.expand(B, T, T).clone()
    mask[draw(0, B - 1), draw(0, T - 1), draw(0, T - 1)] ^= True
    call.tree = replace(call.tree, mask=mask)


@wrong
def form_of_a_tree(call: Call, draw: Draw) -> None:
    depth, mask = call.tree.depth, call.tree.mask
    call.tree = [
        Tree(depth.float(), mask),
        Tree(depth, mask.to(torch.uint8)),
        Tree(other_size(depth, draw), mask),
        Tree(depth, other_size(mask, draw)),
        Tree(depth[:1], mask),
        Tree(depth, mask[:1]),
    ][draw(0, 5)]


@wrong
def layer_states(call: Call, draw: Draw) -> None:
    stored = call.model.new_layer_states(call.cache, (0, 1))
    ids = (0, [-1, call.model.shape.layers + 1, 1 << 40][draw(0, 2)])
    call.cache.layer_states = [
        LayerStates(ids, stored.states),
        LayerStates(stored.ids, other_size(stored.states, draw)),
        LayerStates(stored.ids, other_dtype(stored.states, draw)),
        LayerStates(stored.ids, strided(stored.states)),
        LayerStates((0, 1, 1), stored.states),
    ][draw(0, 4)]


@wrong
def states(call: Call, draw: Draw) -> None:
    """Return states for a head, one for each token, or None for another model."""
    if call.states is None:
        call.states = torch.zeros(B, T, call.model.shape.hidden)
    else:
        call.states = [None, other_size(call.states, draw)][draw(0, 1)]


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_wrong_value_is_a_value_error_and_the_next_right_call_is_right(kind, models):
    for name, model in models.items():
        expected = right_call(model).run()
        for seed in range(12):
            call = right_call(model)
            WRONG[kind](call, random.Random(f"{kind} {name} {seed}").randint)
            cache, used = call.cache, list(call.cache.used)
            before = cache.keys.clone(), cache.values.clone()
            with pytest.raises(ValueError):  # noqa: PT011
                call.run()
            assert cache.used == used
            assert torch.equal(cache.keys, before[0])
            assert torch.equal(cache.values, before[1])
            assert torch.equal(right_call(model).run(), expected)


@pytest.mark.parametrize("int8", [False, True])
def test_weights_of_other_sizes_or_dtypes_are_refused(models, int8):
    rng = random.Random(0)
    target = models["float32"]
    block = target.blocks[0]
    names = [field.name for field in fields(block) if isinstance(getattr(block, field.name), Tensor)]
    assert {"qkv", "o", "gate_up", "down", "input_norm", "post_norm"} <= set(names)
    for change in (partial(other_size, draw=rng.randint), torch.Tensor.double):
        for name in ("head", "norm"):
            with pytest.raises(ValueError):  # noqa: PT011
                NativeLlama(altered(target, **{name: change(getattr(target, name))}), int8)
        for name in names:
            changed = replace(block, **{name: change(getattr(block, name))})
            with pytest.raises(ValueError):  # noqa: PT011
                NativeLlama(altered(target, blocks=[changed, *target.blocks[1:]]), int8)


def test_ids_of_a_trimmed_head_outside_the_vocabulary_are_refused(models):
    target = models["float32"]
    for token in (-1, target.vocab, 1 << 40):
        with pytest.raises(ValueError, match=str(token)):
            NativeLlama(altered(target, head_ids=torch.tensor([3, token]), head=target.head[:2]))


@pytest.mark.parametrize("parents", [(0, -1), (0, 2), (1,), (0, 0, 5)])
def test_a_parent_is_an_earlier_token(parents):
    with pytest.raises(ValueError, match=str(parents[-1])):
        Tree.from_parents(parents)


def altered(model: Llama, **values: object) -> Llama:
    """Return a Llama that shares the model's weights, except for these."""
    other = copy.copy(model)
    other.__class__ = Llama
    vars(other).update(values)
    return other
