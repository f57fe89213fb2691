"""What heads share: their sizes, their files, and drafting from the states of the target's layers.

B rows (texts of a batch), T positions, A layers of the target that the head reads, D hidden, E hidden of the target, V
vocab, W draft vocab. In a text of n tokens, the target has read n - 1 tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from draftlab.drafters.base import DRAFTERS, DrafterSpec, Input, RunFacts
from draftlab.drafters.passes import Head
from draftlab.engine.generate import Drafter, TokenIds
from draftlab.errors import UserError, one_line
from draftlab.model import checkpoint
from draftlab.model.checkpoint import check_finite, check_weight
from draftlab.model.decoder import Decoder
from draftlab.model.devices import staged
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.hf_files import CONFIG, context_of
from draftlab.model.llama import Cache, LayerStates, Llama
from draftlab.model.saving import save_finite
from draftlab.model.shape import Shape
from draftlab.reading import FileModel, read_model, reading
from draftlab.runs import provenance

WEIGHTS = "model.safetensors"
MOST_DRAFTED = 32

# fields of HeadSizes, and their names in transformers' configurations
LAYER_FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "eps": "rms_norm_eps",
    "context": "max_position_embeddings",
    "vocab": "vocab_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """Sizes of a target, which its heads must match."""

    name: str
    layers: int
    hidden: int
    vocab: int

    @classmethod
    def of(cls, directory: Path) -> "TargetSizes":
        """Read the sizes from config.json of a target. Raises UserError: transformers does not know the model."""
        checkpoint.read_config(directory)
        with reading(f"{directory}/config.json cannot be used"):
            config: Any = checkpoint.auto_config(directory).get_text_config()
        return cls(
            name=directory.name,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )

    def check_layers(self, name: str, layer_ids: Sequence[int]) -> None:
        """Raise UserError if a head reads a layer that the target lacks. name: The head, for the error message."""
        if any(not 0 <= i <= self.layers for i in layer_ids):
            read = ", ".join(map(str, layer_ids))
            raise UserError(
                f"{name} reads the target's layers {read}, but {self.name} has only {self.layers} layers; use "
                f"layer_ids from 0 to {self.layers}, or the head's own target"
            )

    def default_layer_ids(self) -> tuple[int, ...]:
        """Return the ids of the layers whose outputs a head reads if its config.json does not list them.

        For a target of n layers the ids are 2, n // 2 and n - 3, as in servers. If n is below 7, they are 1, n // 2 and
        n - 1.

        Raises:
            UserError: the target has fewer than four layers.
        """
        if self.layers < 4:
            raise UserError(
                f"{self.name} has {self.layers} layers, but an EAGLE-3 head needs a target with at least 4 layers"
            )
        return (2, self.layers // 2, self.layers - 3) if self.layers > 6 else (1, self.layers // 2, self.layers - 1)


class HeadConfig(FileModel):
    """Sizes of a head, from which the sizes of all its tensors follow.

    A new kind of head adds its own fields, and has them as the content of config.json: see read_head and write_head.

    Attributes:
        hidden: Hidden size of the head.
        layer_ids: Target layers whose states the head reads. Id i is the residual stream after i layers, before the
            final norm.
    """

    hidden: int = Field(ge=1)
    vocab: int = Field(ge=1)
    layer_ids: tuple[int, ...] = Field(min_length=1)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the head's required tensors by name. EAGLE-3 and DFlash have the names of speculators."""
        raise NotImplementedError

    def check_tensors(self, sizes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        """Raise UserError if a tensor is missing, unknown, or of another size than config.json gives.

        sizes: Size of each tensor by name.
        """
        check_sizes(sizes, self.sizes(), {}, folder)

    def check_target(self, name: str, target: TargetSizes, hidden: int) -> None:
        """Raise UserError if the head is for another target. hidden: Width of the states that the head reads."""
        if (hidden, self.vocab) != (target.hidden, target.vocab):
            raise UserError(
                f"{name} is a head for another target than {target.name}: the head has hidden size {hidden} and "
                f"vocabulary {self.vocab}, but the target has {target.hidden} and {target.vocab}; name the head's own "
                "target with --target"
            )
        target.check_layers(name, self.layer_ids)


class HeadSizes(HeadConfig):
    """Sizes of a head: the fields that EAGLE-3 and DFlash heads have in common.

    Attributes:
        context: Length in tokens of the longest text.
        draft_vocab: Number of the target's ids that the head predicts.
    """

    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    ffn: int = Field(ge=1)
    eps: float
    context: int = Field(ge=1)
    draft_vocab: int = Field(ge=1)

    @property
    def most(self) -> int:
        """Return the largest number of tokens that the head can draft in a step."""
        return MOST_DRAFTED

    def shape_of(self, layers: int, qk_norm: bool) -> Shape:
        """Return the shape of the head's layers, with the target's vocabulary."""
        sizes = {name: getattr(self, name) for name in LAYER_FIELDS if name not in ("eps", "context")}
        return Shape(layers=layers, qk_norm=qk_norm, **sizes)

    def check_tensors(self, sizes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        """Check the tensors of a head, see HeadConfig. A head of all ids needs neither d2t nor lm_head."""
        needed = self.sizes()
        known = {
            "d2t": (self.draft_vocab,),
            "t2d": (self.vocab,),
            "embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.draft_vocab, self.hidden),
        } | needed
        if self.draft_vocab < self.vocab:
            needed |= {name: known[name] for name in ("d2t", "lm_head.weight")}
        check_sizes(sizes, needed, known, folder)


AnyConfig = TypeVar("AnyConfig", bound=HeadConfig)


def read_head(kind: type[AnyConfig], folder: Path, target: Path) -> AnyConfig:
    """Return the config.json of a head that write_head wrote. Its tensors are checked, but no weights are read.

    kind: Class of the head's config.json.

    Raises:
        UserError: A file is missing or damaged, config.json does not fit the class or the tensors, or the head is for
            another target.
    """
    config = read_model(kind, folder / CONFIG)
    config.check_target(str(folder), TargetSizes.of(target), config.hidden)
    config.check_tensors(tensor_sizes(folder), folder)
    return config


def write_head(folder: Path, config: HeadConfig, weights: Mapping[str, Tensor]) -> None:
    """Write config.json and the weights of a head. Raises UserError: A weight is NaN or infinite."""
    (folder / CONFIG).write_text(config.model_dump_json(indent=2))
    save_finite(folder / WEIGHTS, {name: weight.cpu().contiguous() for name, weight in weights.items()})


def check_sizes(
    sizes: Mapping[str, tuple[int, ...]],
    needed: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    folder: Path,
) -> None:
    """Raise UserError if a tensor of a head is missing, unknown, or of another size. All arguments: sizes by name."""
    known = {**optional, **needed}
    for name in sorted(needed.keys() | sizes.keys()):
        size = sizes.get(name)
        expected = known.get(name)
        if size != expected:
            raise UserError(
                f"{folder}: the tensor {name} has the size {size}, but its config.json requires {expected} (None: "
                "no such tensor); download or train the head again"
            )


def layer_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the tensors of a shape's layers and final norm, by name without the prefix "model."."""
    return {
        name.removeprefix("model."): shape.dims(axes)
        for name, axes in shape.axes().items()
        if name.startswith(("model.layers.", "model.norm."))
    }


def layer_config(kind: type["PreTrainedConfig"], content: Mapping[str, Any]) -> Any:
    """Return the configuration of a head's layers as an object of `kind`, such as LlamaConfig.

    content: Content of the head's config.json.
    """
    layer = content.get("transformer_layer_config", content)
    known = {name: value for name, value in layer.items() if name not in ("dtype", "torch_dtype", "model_type")}
    return kind(**known)


def sizes_of(layer: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of HeadSizes that are in LAYER_FIELDS. layer: transformers' configuration of the layers."""
    sizes = {field: getattr(layer, name) for field, name in LAYER_FIELDS.items()}
    return sizes | {"context": context_of(layer.to_dict())}


def tensor_sizes(folder: Path, rename: Callable[[str], str] = str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a head's tensors by name. No weights are read. rename: See read_tensors.

    Raises:
        UserError: There is no weight file, or it is damaged.
    """
    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder} has no {WEIGHTS}; use a head with safetensors")
    with reading(folder / WEIGHTS), safe_open(folder / WEIGHTS, framework="pt") as file:
        return {rename(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(folder: Path, rename: Callable[[str], str] = str) -> dict[str, Tensor]:
    """Return the tensors of a head by name. rename: Function from the name in the file to the returned name.

    Raises:
        UserError: there is no weight file, a weight has no floating-point dtype, or a value is not finite.
    """
    with reading(folder / WEIGHTS):
        tensors = {rename(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    for name, tensor in tensors.items():
        (check_finite if name in ("d2t", "t2d") else check_weight)(tensor, name, folder)
    return tensors


def draft_ids(offsets: Tensor, known: Tensor | None, vocab: int, folder: Path) -> Tensor:
    """Return the target id of each draft id, [W], from a head's d2t.

    Args:
        offsets: The tensor d2t: target id minus draft id, [W].
        known: The tensor t2d, [V]: nonzero for the target ids that the head predicts. None: the head has no t2d, and
            d2t is not compared with it.

    Raises:
        UserError: d2t has a floating-point dtype, two draft ids have the same target id, an id is out of range, or t2d
            and d2t contradict each other.
    """
    ids = torch.arange(len(offsets)) + offsets.long()
    used = ids.unique()  # ascending
    in_range = bool((ids >= 0).all() and (ids < vocab).all())
    named = used if known is None else known.bool().nonzero().squeeze(1)
    if offsets.is_floating_point() or len(used) < len(ids) or not in_range or not torch.equal(named, used):
        raise UserError(
            f"{folder}: the tensor d2t must have an integer dtype, and map each draft id to a different target id, "
            f"from 0 to {vocab - 1}, as in t2d; download or train the head again"
        )
    return ids


def check_settings(
    settings: Mapping[str, Any],
    supported: Mapping[str, tuple[object, ...]],
    folder: Path,
    kind: str,
) -> None:
    """Raise UserError if a setting of a head is set to a value that draftlab does not support.

    settings: Content of config.json. supported: The supported values of some settings. kind: The kind of head.
    """
    for name, values in supported.items():
        value = settings.get(name)
        if value is not None and value not in values:
            raise UserError(
                f"{folder} is a head of kind {kind} with {name} {one_line(repr(value), 80)}, which draftlab does not "
                "support; use another head"
            )


def check_mask_token(token: int, vocab: int, folder: Path) -> None:
    """Raise UserError if the id of a head's mask token is not in the vocabulary."""
    if token >= vocab:
        raise UserError(f"{folder}: mask_token_id is {token}, but the vocabulary has only the ids 0 to {vocab - 1}")


class HeadSpec(DrafterSpec):
    """Base class of drafters with a head that reads the target's states. heads: Directory of the head."""

    format: ClassVar[str]  # name of the kind of head, for messages
    file: ClassVar[str] = CONFIG  # file that every directory of a head has
    remedy: ClassVar[str] = ""  # end of the error message if the directory has no head

    heads: str

    @classmethod
    def read(cls, folder: Path, target: Path) -> object:
        """Check a head, and return its sizes, as read_head does. No weights are read.

        Raises:
            UserError: The folder has no such head for this target. Any other error of a parser becomes a UserError of
                one line, see check().
        """
        raise NotImplementedError

    def load_drafter(self, target_path: Path, target: Llama | HFDecoder, device: torch.device) -> Drafter:
        """Load the head on a device, and return a drafter for a target that is loaded already.

        Raises:
            UserError: The errors of read, or the weights are damaged.
        """
        raise NotImplementedError

    def check(self, run: RunFacts) -> None:
        super().check(run)
        with reading(f"--drafter {self.text}: the head in {self.heads} cannot be read"):
            self.read(Path(self.heads), run.target)

    def inputs(self) -> list[Input]:
        return [Input(self.heads, self._check_heads), *super().inputs()]

    def _check_heads(self, name: str, weights: bool) -> None:
        if not (Path(name) / self.file).is_file():
            raise UserError(
                f"--drafter {self.text}: there is no {self.format} head in {name}, because {self.file} is "
                f"missing{self.remedy}"
            )

    def readable(self, target: Decoder) -> Llama | HFDecoder:
        """Return the target's model. Raises UserError: draftlab cannot read the states of its layers."""
        if not isinstance(target, Llama | HFDecoder):
            raise self.refused_by_transformers()
        return target

    def facts(self) -> dict[str, object]:
        """Return the fields that describe the head in a score, see DrafterRun.facts."""
        return {"heads_sha256": provenance.fingerprint(Path(self.heads))}


def head_kind(name: str) -> type[HeadSpec]:
    """Return a kind of drafter that has a head. Raises UserError: there is no such kind of head."""
    kind = DRAFTERS.get(name, "head")
    if not issubclass(kind, HeadSpec):
        raise UserError(f"the drafter {name} has no head; name a head's drafter, such as eagle")
    return kind


class StatesDrafter(Drafter, Generic[Head]):
    """Base class of drafters whose head reads the target's states. It records which positions the head has read."""

    cache: Cache
    layer_states: LayerStates

    def __init__(self, target: Llama | HFDecoder, head: Head) -> None:
        self.target = target
        self.head = head
        self.vocab = target.vocab

    def reset(self, rows: int, capacity: int) -> None:
        vars(self).pop("cache", None)  # frees the memory before a new cache is allocated
        self.cache = self.head.new_cache(rows, capacity)
        self.read = [0] * rows  # number of positions of each text that the head has read

    def attach(self, cache: Any) -> None:
        self.layer_states = self.target.new_layer_states(cache, self.head.layer_ids)
        cache.layer_states = self.layer_states

    def new_positions(self, texts: TokenIds) -> tuple[list[int], Tensor]:
        """Return the first position that the head reads of each text, and all positions that it reads, [B, T].

        T is the largest number of new positions of a text, but at least 1. Texts with fewer new positions read some
        positions again.
        """
        ends = [len(text) - 1 for text in texts]
        width = max(end - min(read, end - 1) for end, read in zip(ends, self.read, strict=True))
        starts = [max(0, end - width) for end in ends]
        device = self.head.device
        return starts, staged(starts, device).unsqueeze(1) + torch.arange(width, device=device)

    def states_at(self, positions: Tensor) -> Tensor:
        """Return the target's states at positions [B, T] of the texts, [B, T, A D], on the head's device.

        A: number of layers whose states the head reads. D: hidden size of the target.
        """
        states = self.layer_states.states
        rows = torch.arange(len(positions), device=states.device).unsqueeze(1)
        return states[rows, positions.to(states.device)].to(self.head.device)


def target_states(target: Llama | HFDecoder, layer_ids: tuple[int, ...], ids: Tensor) -> Tensor:
    """Return the target's states after each of the layers `layer_ids`, concatenated, [1, T, A E].

    T: number of `ids`. A: number of layers. E: hidden size of the target.
    """
    cache: Any = target.new_cache(1, len(ids))
    states = cache.layer_states = target.new_layer_states(cache, layer_ids)
    target.forward(ids[None], cache, last=1)
    return states.states
