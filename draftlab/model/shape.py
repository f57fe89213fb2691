"""Shapes of LLaMA-like models: their sizes, the names of their weights, and what they cost. Torch is not imported.

TABLE lists every weight and names its axes: vocab; hidden (the residual stream); q = heads x head_dim; kv = kv_heads x
head_dim; head_dim; ffn.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from draftlab.errors import OtherArchitecture, UserError, one_line
from draftlab.reading import read_yaml, reading
from draftlab.runs.atomic import write_atomic

Axis = Literal["vocab", "hidden", "q", "kv", "head_dim", "ffn"]
BlockOption = Literal["qkv_bias", "o_bias", "mlp_bias", "qk_norm", "qk_layernorm", "whole_qk_norm", "norm_after"]
BLOCK_OPTIONS: tuple[BlockOption, ...] = get_args(BlockOption)
Option = Literal["untied"] | BlockOption


class Row(NamedTuple):
    """A weight in TABLE.

    Args:
        role: Name in draftlab, such as "q".
        name: Name of the tensor, with {} in place of the layer's index.
        axes: Axis of each dimension.
        when: If set, only models with this option have the weight.
        unless: If set, only models without this option have the weight.
    """

    role: str
    name: str
    axes: tuple[Axis, ...]
    when: Option | None = None
    unless: Option | None = None

    @property
    def in_block(self) -> bool:
        return self.name.startswith(BLOCK)

    def belongs_to(self, options: frozenset[Option]) -> bool:
        return (self.when is None or self.when in options) and self.unless not in options


BLOCK = "model.layers.{}."
TABLE: tuple[Row, ...] = (
    Row("embed", "model.embed_tokens.weight", ("vocab", "hidden")),
    Row("q", BLOCK + "self_attn.q_proj.weight", ("q", "hidden")),
    Row("q_bias", BLOCK + "self_attn.q_proj.bias", ("q",), "qkv_bias"),
    Row("k", BLOCK + "self_attn.k_proj.weight", ("kv", "hidden")),
    Row("k_bias", BLOCK + "self_attn.k_proj.bias", ("kv",), "qkv_bias"),
    Row("v", BLOCK + "self_attn.v_proj.weight", ("kv", "hidden")),
    Row("v_bias", BLOCK + "self_attn.v_proj.bias", ("kv",), "qkv_bias"),
    Row("o", BLOCK + "self_attn.o_proj.weight", ("hidden", "q")),
    Row("o_bias", BLOCK + "self_attn.o_proj.bias", ("hidden",), "o_bias"),
    Row("q_norm", BLOCK + "self_attn.q_norm.weight", ("head_dim",), "qk_norm"),
    Row("k_norm", BLOCK + "self_attn.k_norm.weight", ("head_dim",), "qk_norm"),
    Row("q_norm", BLOCK + "self_attn.q_norm.weight", ("q",), "whole_qk_norm"),
    Row("k_norm", BLOCK + "self_attn.k_norm.weight", ("kv",), "whole_qk_norm"),
    Row("q_layernorm", BLOCK + "self_attn.query_layernorm.weight", ("head_dim",), "qk_layernorm"),
    Row("k_layernorm", BLOCK + "self_attn.key_layernorm.weight", ("head_dim",), "qk_layernorm"),
    Row("gate", BLOCK + "mlp.gate_proj.weight", ("ffn", "hidden")),
    Row("gate_bias", BLOCK + "mlp.gate_proj.bias", ("ffn",), "mlp_bias"),
    Row("up", BLOCK + "mlp.up_proj.weight", ("ffn", "hidden")),
    Row("up_bias", BLOCK + "mlp.up_proj.bias", ("ffn",), "mlp_bias"),
    Row("down", BLOCK + "mlp.down_proj.weight", ("hidden", "ffn")),
    Row("down_bias", BLOCK + "mlp.down_proj.bias", ("hidden",), "mlp_bias"),
    Row("input_norm", BLOCK + "input_layernorm.weight", ("hidden",), unless="norm_after"),
    Row("post_norm", BLOCK + "post_attention_layernorm.weight", ("hidden",), unless="norm_after"),
    Row("attention_norm", BLOCK + "post_attention_layernorm.weight", ("hidden",), "norm_after"),
    Row("mlp_norm", BLOCK + "post_feedforward_layernorm.weight", ("hidden",), "norm_after"),
    Row("norm", "model.norm.weight", ("hidden",)),
    Row("head", "lm_head.weight", ("vocab", "hidden"), "untied"),
)

Size = Annotated[int, Field(ge=1, le=1 << 24)]


class Shape(BaseModel):
    """The sizes of a LLaMA-like model, and options that decide which weights of TABLE the model has."""

    # strict, because otherwise "layers: yes" in a YAML file would mean 1 layer
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    layers: int = Field(ge=1, le=10_000)
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn: Size
    vocab: Size
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_layernorm: bool = False  # q/k norms after rotary embeddings, with other names (Hunyuan)
    whole_qk_norm: bool = False  # q/k norms over all heads at once (OLMo 2)
    norm_after: bool = False  # norms of the outputs of attention and MLP, in place of norms of their inputs (OLMo 2)
    draft_vocab: PositiveInt | None = None  # number of ids that a trimmed LM head has; None: all

    @property
    def sizes(self) -> dict[Axis, int]:
        """Return the size of each axis."""
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
        }

    @property
    def options(self) -> frozenset[Option]:
        found: set[Option] = {name for name in BLOCK_OPTIONS if getattr(self, name)}
        return frozenset(found if self.tied else {*found, "untied"})

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Return the axes of each weight by the tensor's name, in the order of transformers' named_parameters()."""
        axes: dict[str, tuple[Axis, ...]] = {}
        for in_block, group in groupby(self._rows(), lambda row: row.in_block):
            rows = list(group)
            for layer in range(self.layers if in_block else 1):
                axes |= {row.name.format(layer): row.axes for row in rows}
        return axes

    def names(self, layer: int = 0) -> dict[str, str]:
        """Return the tensor names of one layer's weights and of the weights outside layers, by role."""
        return {row.role: row.name.format(layer) for row in self._rows()}

    def dims(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        sizes = self.sizes
        return tuple(sizes[axis] for axis in axes)

    def params(self) -> int:
        """Return the number of stored parameters. A head that is tied to the embedding is not counted again."""
        return self.body_params() + self._count(in_blocks=False)

    def used_params(self) -> int:
        """Return the number of parameters that training can change.

        A checkpoint with a trimmed head stores the complete head. Unless the head is tied to the embedding, its other
        rows have no use.
        """
        return self.params() - (0 if self.tied else self.idle_head_params())

    def body_params(self) -> int:
        """Return the number of parameters of the layers, without embedding, head and final norm."""
        return self.layers * self._count(in_blocks=True)

    def _rows(self) -> list[Row]:
        options = self.options
        return [row for row in TABLE if row.belongs_to(options)]

    def _count(self, in_blocks: bool) -> int:
        rows = [row for row in self._rows() if row.in_block == in_blocks]
        return sum(math.prod(self.dims(row.axes)) for row in rows)

    def flops_per_token(self, context: int) -> int:
        """Return the number of floating-point operations to decode one token after `context` cached tokens.

        Every parameter of a matrix takes one multiply-add, which is 2 operations. The embedding takes none, but the LM
        head does, even if the two are tied. Rows that a trimmed head does not use take none. Attention adds 4 x heads x
        head_dim operations per layer for each cached token and for the new token.
        """
        embedding = self.vocab * self.hidden
        matrices = sum(math.prod(self.dims(axes)) for axes in self.axes().values() if len(axes) == 2)
        products = matrices - embedding + (embedding if self.tied else 0) - self.idle_head_params()
        return 2 * products + 4 * self.layers * self.sizes["q"] * (context + 1)

    def with_whole_head(self) -> "Shape":
        return self.model_copy(update={"draft_vocab": None})

    def idle_head_params(self) -> int:
        """Return the number of LM head parameters that stay unused, because the head is trimmed to fewer ids."""
        return 0 if self.draft_vocab is None else (self.vocab - self.draft_vocab) * self.hidden

    def weight_bytes(self, bytes_per_weight: float = 2) -> int:
        return int(self.params() * bytes_per_weight)

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> int:
        """Return the bytes of the KV cache per token: in each layer a key and a value of kv_heads x head_dim."""
        return int(2 * self.layers * self.sizes["kv"] * bytes_per_value)

    def tensor_parallel(self) -> list[int]:
        """Return the tensor-parallel sizes: powers of two up to 64 that divide heads, KV heads, ffn and vocab."""
        common = math.gcd(self.heads, self.kv_heads, self.ffn, self.vocab)
        return [2**i for i in range(7) if common % 2**i == 0]

    def describe(self) -> str:
        count = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        head = f"{count} head{'s' * (self.heads > 1)}"
        used = self.used_params()
        stored = self.params()
        trimmed = "" if self.draft_vocab is None else f", a head of {self.draft_vocab:,} ids"
        whole = "" if used == stored else f" ({format_count(stored)} are stored)"
        return (
            f"{self.layers} x {self.hidden}, {head} of {self.head_dim}, ffn {self.ffn}, "
            f"{format_count(used)} parameters{trimmed}{whole}"
        )


def block_options(tensors: Mapping[str, tuple[int, ...]], sizes: Mapping[Axis, int]) -> frozenset[Option]:
    """Detect the options of a model from the names and sizes of its first layer's tensors.

    An option is detected if all of its weights are there, in the expected sizes. A model with norm_after lacks some
    weights that other models have, so norm_after is detected only if at least one of those weights is missing.

    Args:
        tensors: Size of each tensor, by name.
        sizes: Size of each axis.
    """
    found: set[Option] = set()
    for option in BLOCK_OPTIONS:
        own = [row for row in TABLE if row.when == option]
        replaced = [row for row in TABLE if row.unless == option]
        fits = all(tensors.get(row.name.format(0)) == tuple(sizes[axis] for axis in row.axes) for row in own)
        if fits and not (replaced and all(row.name.format(0) in tensors for row in replaced)):
            found.add(option)
    return frozenset(found)


def read_shape_file(path: Path) -> Shape:
    """Read a shape from a shape file, which has the fields of Shape in YAML.

    Raises:
        UserError: there is no such file, it is not YAML, a field is unknown or missing, or a value is not allowed.
    """
    with reading(f"shape file {path}"):
        return Shape.model_validate(read_yaml(path, f"shape file {path}"))


def write_shape_file(shape: Shape, path: Path, note: str) -> None:
    """Write a shape file. Options that are off are left out. note: Comment for the first line.

    Raises:
        UserError: the file cannot be written.
    """
    fields = {name: value for name, value in shape.model_dump().items() if value is not False and value is not None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"# {note}\n" + yaml.safe_dump(fields, sort_keys=False))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def check(shape: Shape, *, llama: bool = True) -> None:
    """Check that transformers can build a model of a shape.

    llama: Whether the model has a LlamaConfig. In transformers 5, LlamaConfig requires that heads divides hidden, even
    if head_dim is set.

    Raises:
        UserError: kv_heads does not divide heads, or llama is True and heads does not divide hidden.
    """
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"heads ({shape.heads}) is not a multiple of kv_heads ({shape.kv_heads}); change heads or kv_heads in the "
            "shape file"
        )
    if llama and shape.hidden % shape.heads:
        widths = " or ".join(map(str, multiples_near(shape.hidden, shape.heads)))
        raise UserError(
            f"the width {shape.hidden} is not a multiple of the number of heads, {shape.heads}; use a width of {widths}"
        )


def check_within(shape: Shape, source: Shape) -> None:
    """Check that pruning can cut a model of this shape from a source model.

    Raises:
        UserError: a size or the number of heads per KV head is larger than the source's, or head_dim, vocab or an
            option differs from the source's.
        OtherArchitecture: the source has norms after attention and MLP, which pruning does not support.
    """
    if source.norm_after:
        raise OtherArchitecture(
            "the source has norms after attention and MLP, but prune cuts only models with norms before attention and "
            "MLP; use another source"
        )
    for field, option in {"layers": "--layers", "hidden": "--width", "ffn": "--ffn"}.items():
        size = getattr(shape, field)
        limit = getattr(source, field)
        if size > limit:
            raise UserError(f"{option} {size}: the source has only {limit}; use {option} {limit} or less")
    for field in sorted(Shape.model_fields.keys() - {"layers", "hidden", "heads", "kv_heads", "ffn", "draft_vocab"}):
        value = getattr(shape, field)
        expected = getattr(source, field)
        if value != expected:
            raise UserError(
                f"{field} {value} differs from the source's {field}, {expected}, which pruning cannot change; set "
                f"{field} to {expected} in the shape file"
            )
    group = shape.heads // shape.kv_heads
    most = source.heads // source.kv_heads
    if shape.heads > source.heads or shape.kv_heads > source.kv_heads or group > most:
        raise UserError(
            f"{shape.heads} heads with {shape.kv_heads} kv_heads cannot be cut from the source; use at most "
            f"{source.heads} heads, {source.kv_heads} kv_heads and {most} heads per kv_head"
        )


def resolve(
    source: Shape,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    ffn: int | None = None,
    params: int | None = None,
    multiple_of: int = 16,
) -> Shape:
    """Return the shape to cut from a source. Sizes that are not set follow from the source.

    default_heads() gives the number of heads. The number of KV heads is the smallest for which the number of heads per
    KV head is no larger than in the source.

    Args:
        layers, hidden: Default: the source's.
        ffn: Default: hidden times the source's ratio ffn / hidden, rounded up to a multiple of multiple_of, but at most
            the source's ffn.
        params: Number of parameters that the shape must have. It determines the ffn.
        multiple_of: A computed ffn is a multiple of this number.

    Raises:
        UserError: the shape exceeds the source, no ffn gives `params` parameters, or both params and ffn are set.
    """
    if params is not None and ffn is not None:
        raise UserError(f"--params and --ffn {ffn} both set the FFN size; leave one option out")
    layers = layers or source.layers
    hidden = hidden or source.hidden
    heads = default_heads(source, hidden)
    scaled = -(-source.ffn * hidden // source.hidden)
    shape = source.model_copy(
        update={
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": fewest_kv_heads(heads, source.heads // source.kv_heads),
            "ffn": ffn or min(source.ffn, round_up(scaled, multiple_of)),
        }
    )
    if params is not None:
        shape = solve_ffn(shape, params, most=source.ffn, multiple_of=multiple_of)
    check_within(shape, source)
    return shape


def default_heads(source: Shape, hidden: int) -> int:
    """Return the number of heads for a draft of width `hidden`: hidden / head_dim, or the nearest legal number.

    A number is legal if it divides `hidden`, and if the draft then has no more heads, KV heads and heads per KV head
    than the source. At the source's width, return the source's number of heads. If no number is legal, return hidden /
    head_dim, rounded down, but at least 1 and at most the source's number of heads.
    """
    if hidden == source.hidden:
        return source.heads
    group = source.heads // source.kv_heads
    natural = min(max(1, hidden // source.head_dim), source.heads)
    legal = [
        heads
        for heads in range(1, source.heads + 1)
        if hidden % heads == 0 and fewest_kv_heads(heads, group) <= source.kv_heads
    ]
    return min(legal, key=lambda heads: (abs(heads - natural), heads), default=natural)


def solve_ffn(shape: Shape, params: int, *, most: int, multiple_of: int = 16) -> Shape:
    """Return this shape with a different ffn, so that its number of parameters is as near as possible to `params`.

    The new ffn is either a multiple of `multiple_of` or exactly `most`.

    Raises:
        UserError: no ffn from multiple_of to `most` gives a number of parameters within 1 % of `params`.
    """
    solved = nearest_ffn(shape, Shape.params, params, most=most, step=multiple_of)
    if abs(solved.params() - params) > 0.01 * params:
        low, high = (shape.model_copy(update={"ffn": ffn}).params() for ffn in (multiple_of, most))
        raise UserError(
            f"{shape.layers} layers of width {shape.hidden} cannot have {format_count(params)} parameters: FFN sizes "
            f"from {multiple_of} to {most} give {format_count(low)} to {format_count(high)}; change --params, --layers "
            "or --width"
        )
    return solved


def nearest_ffn(shape: Shape, cost: Callable[[Shape], float], amount: float, *, most: int, step: int) -> Shape:
    """Return the shape with the ffn for which `cost` is nearest to `amount`. The cost must grow with the ffn.

    The ffn is `most` or a smaller multiple of `step`.
    """

    def over(ffn: int) -> float:
        return cost(shape.model_copy(update={"ffn": ffn})) - amount

    ffns = [*range(step, most, step), most]
    above = bisect_left(ffns, 0, key=over)
    nearest = min(ffns[max(0, above - 1) : above + 1], key=lambda ffn: abs(over(ffn)))
    return shape.model_copy(update={"ffn": nearest})


def parse_count(text: str) -> int:
    """Parse a number of parameters: '1.3b', '796M', '350k' or a plain number. Raises UserError: it is none of these."""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9}.get(text[-1:].lower(), 1)
    try:
        count = round(float(text if scale == 1 else text[:-1]) * scale)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise UserError(f"{text!r} is not a number of parameters; write 1.3b, 796m, 350k or a whole number above 0")
    return count


def parse_vocab(text: str) -> int:
    """Parse a number of token ids: '16k' (16,384 ids) or a plain number. Raises UserError: it is neither."""
    match = re.fullmatch(r"([1-9]\d*)(k?)", text.strip().lower())
    if match is None:
        raise UserError(f"{text!r} is not a number of ids; write 16k (16,384) or a whole number above 0")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_numbers(text: str) -> list[int]:
    """Parse a list of whole numbers, such as '1-4', '2,4,8' or '1-3,8'. Return the distinct numbers in ascending order.

    Raises:
        UserError: the text is no such list, or a number is below 1 or above 999,999.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,5})\s*(?:-\s*([1-9]\d{0,5})\s*)?", part)
        listed = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not listed:
            raise UserError(f"{one_line(text, 80)!r} is not a list of numbers from 1 to 999,999; write 1-6 or 2,4,8")
        numbers |= set(listed)
    return sorted(numbers)


def format_count(count: float) -> str:
    """Return a count as text with at most three significant digits, such as 1.3B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * scale:  # 999.5M would be 1e+03M with three digits, so it is 1B
            return f"{count / scale:.3g}{unit}"
    return str(int(count))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fewest_kv_heads(heads: int, group: int) -> int:
    """Return the smallest number of KV heads that divides `heads` and leaves at most `group` heads per KV head."""
    return next(n for n in range(-(-heads // group), heads + 1) if heads % n == 0)


def multiples_near(value: int, base: int) -> list[int]:
    """Return the largest multiple of `base` up to `value`, and the next multiple. 0 is left out."""
    below = value // base * base
    return sorted({max(base, below), below + base})
