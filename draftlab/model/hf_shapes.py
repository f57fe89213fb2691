"""Shapes of Hugging Face directories, from config.json and the headers of tensors. Torch only to compare tied heads."""

from pathlib import Path

from pydantic import ValidationError

from draftlab.errors import OtherArchitecture, UserError
from draftlab.model.families import locate_shape
from draftlab.model.head_ids import read_head_ids
from draftlab.model.headers import check_stored, read_headers
from draftlab.model.hf_files import read_config
from draftlab.model.layouts import other_layout
from draftlab.model.quantization import check_unquantised
from draftlab.model.shape import Shape
from draftlab.reading import validation_text


def read_shape(directory: Path) -> Shape:
    """Return the shape of a checkpoint, from its config and the names and sizes of its tensors; none is read.

    Families are detected by structure: biases and q/k norms by the names of tensors.

    Raises:
        UserError: not LLaMA-like (names the tensor), or config and tensors disagree.
    """
    config = read_config(directory)
    check_unquantised(directory, config)
    headers = read_headers(directory)
    shape = shape_of(config, frozenset(headers))
    _check_tensors(directory, config, shape, {name: header.shape for name, header in headers.items()})
    check_stored(directory, headers)
    if shape.tied and "lm_head.weight" in headers:
        from draftlab.model.weights import check_tied  # torch

        check_tied(directory)
    ids = read_head_ids(directory, shape.vocab)
    return shape if ids is None else shape.model_copy(update={"draft_vocab": len(ids)})


def planned_shape(directory: Path) -> Shape:
    """Return the shape of a checkpoint, from its config alone if its weights have not been downloaded.

    Raises:
        UserError: see read_shape.
    """
    config = read_config(directory)
    if any(directory.glob("*.safetensors")) or other_layout(directory):
        return read_shape(directory)
    check_unquantised(directory, config)
    import torch

    from draftlab.model.checkpoint import meta_model

    sizes = {name: tuple(p.shape) for name, p in meta_model(config, torch.float32).named_parameters()}
    shape = shape_of(config, frozenset(sizes))
    _check_tensors(directory, config, shape, sizes)
    return shape


def named_shape(name: str) -> tuple[str, Shape]:
    """Return what to call a shape file, a shape that comes with draftlab or a checkpoint, and its shape.

    Raises:
        UserError: see locate_shape and read_shape.
    """
    called, place = locate_shape(name)
    return called, place if isinstance(place, Shape) else planned_shape(place)


def shape_of(config: dict[str, object], names: frozenset[str]) -> Shape:
    """Return the shape by a config's numbers and the names of the tensors."""

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int):
            raise OtherArchitecture(f"config.json of a {config.get('model_type')} model has no {key}: not LLaMA-like")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    first = "model.layers.0."
    try:
        return Shape(
            layers=number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // max(1, heads)),
            ffn=number("intermediate_size"),
            vocab=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", "lm_head.weight" not in names)),
            qkv_bias=first + "self_attn.q_proj.bias" in names,
            o_bias=first + "self_attn.o_proj.bias" in names,
            mlp_bias=first + "mlp.down_proj.bias" in names,
            qk_norm=first + "self_attn.q_norm.weight" in names,
            qk_layernorm=first + "self_attn.query_layernorm.weight" in names,
        )
    except ValidationError as error:
        raise UserError(f"config.json of a {config.get('model_type')} model: {validation_text(error)}") from None


def _check_tensors(directory: Path, config: dict[str, object], shape: Shape, sizes: dict[str, tuple[int, ...]]) -> None:
    """Raises UserError: an unknown tensor, a missing one, or one of another size."""
    expected = shape.axes()
    names = set(sizes) - ({"lm_head.weight"} if shape.tied else set())
    odd = sorted(names - set(expected))[:1] or sorted(set(expected) - names)[:1]
    if odd:
        kind = "an unknown" if odd[0] in names else "no"
        raise OtherArchitecture(
            f"{directory} ({config.get('model_type')}) is not LLaMA-like: it has {kind} tensor {odd[0]!r}"
        )
    for name, axes in expected.items():
        check_size(directory, name, sizes[name], shape.dims(axes))


def check_size(directory: Path, name: str, size: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises UserError: a tensor has another size than config.json gives it."""
    if size != expected:
        raise UserError(f"{directory}: {name} is {size}, but {expected} by its config.json") from None
