"""Write a new tokenizer for source code, and a model with random weights: python -m benchmarks.tiny_target [OUT]

recipes/tiny-target.yaml then trains this model. The result is the embedded target.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftlab.data.sources import documents, parse_mixture
from draftlab.errors import UserError
from draftlab.model import checkpoint, saving
from draftlab.model.shape import Shape, read_shape_file

SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
# A piece is a word with one sign before it, up to three digits, punctuation with the line break and indentation after
# it, or blank lines with the next indentation. Indentation is most of Python's white space, so it gets single tokens.
CODE_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?|\s*[\r\n]+[ \t]*|[ \t]+"


def train_tokenizer(texts: list[str], vocab: int, out: Path) -> None:
    """Train a byte-level BPE tokenizer on texts, and write it to the directory `out`. Each text begins with bos."""
    tokenizer: Any = Tokenizer(models.BPE())  # Any: the stubs declare attributes as read-only
    split = pre_tokenizers.Split(Regex(CODE_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)]
    )
    bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(out)


def sample_texts(spec: str, limit: int) -> list[str]:
    """Return texts of a mixture's train split, with bytes of each source by its weight. limit: Number of all bytes."""
    texts: list[str] = []
    for name, weight in parse_mixture(spec).items():
        of_source = [document.text for document in documents(name, "train")]
        sizes = np.cumsum([len(text.encode()) for text in of_source])
        count = int(np.searchsorted(sizes, int(limit * weight), side="right"))
        texts += of_source[: max(1, count)]
    return texts


def write_model(shape: Shape, out: Path, *, context: int, seed: int) -> None:
    """Write a LLaMA model with random weights into the directory `out`, which has its tokenizer."""
    special = checkpoint.special_ids(checkpoint.load_tokenizer(out))
    config = llama_config(shape, context=context, **special)
    weights = model_weights(checkpoint.new_model(config, seed), torch.bfloat16)
    saving.write_checkpoint(out, config, weights, None)


def llama_config(shape: Shape, *, context: int, bos: int | None, eos: int | None, pad: int | None) -> dict[str, object]:
    """Return config.json of a new LLaMA of this shape. context: Length in tokens of the longest text.

    Raises:
        UserError: the shape has weights that LLaMA lacks: q/k norms, norms after attention and MLP, or biases of only
            some of q, k, v and o.
    """
    if shape.options - {"untied", "qkv_bias", "o_bias", "mlp_bias"} or shape.qkv_bias != shape.o_bias:
        raise UserError(
            "a new model must be a LLaMA, but this shape has norms or biases that LLaMA lacks; use a shape without q/k "
            "norms, in which q, k, v and o all have biases or all have none"
        )
    base: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": context,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    return checkpoint.config_for(shape, base)


def model_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Return names and parameters of a transformers model, in a dtype and on the CPU. A tied head is left out."""
    return ((name, p.detach().to("cpu", dtype).contiguous()) for name, p in model.named_parameters())


def main(
    out: Annotated[Path, typer.Argument(help="Directory to write.")] = Path("runs/tiny-target/new"),
    shape: Annotated[Path, typer.Option(help="Shape file of the model.")] = Path("configs/widths/tiny-16x256.yaml"),
    data: Annotated[
        str, typer.Option(help="Data to train the tokenizer on.")
    ] = "stdlib=0.45,stdlib-tests=0.15,packages=0.4",
    megabytes: Annotated[float, typer.Option(help="Size of this data, in MB.")] = 24.0,
    context: Annotated[int, typer.Option(help="Longest context of the model.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    of_model = read_shape_file(shape)
    out.mkdir(parents=True)
    train_tokenizer(sample_texts(data, int(megabytes * 1e6)), of_model.vocab, out)
    write_model(of_model, out, context=context, seed=seed)
    typer.echo(f"{out}: {of_model.describe()}")


if __name__ == "__main__":
    typer.run(main)
