"""Loading decoders, and the modes in which their passes run: torch, compiled C++, CUDA graphs."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from draftlab.console import note
from draftlab.errors import OtherArchitecture, Quantised, UserError
from draftlab.model import Mode, checkpoint, llama, native_cpu, parallel
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import RECURRENT, HFDecoder, has_layers
from draftlab.model.native_cpu import NativeLlama
from draftlab.model.recurrent_decoder import RecurrentDecoder


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, device_map: str | None = None
) -> Decoder:
    """Load a checkpoint, with transformers if there is a device_map or llama.py does not support the architecture."""
    if device_map is not None:
        return hosted(checkpoint.load_model(directory, dtype, device, device_map).eval())
    try:
        llama.check_supported(directory)
    except OtherArchitecture as error:
        note(f"{error}; transformers runs the model instead")
    except Quantised:
        note(
            f"{directory} is quantised, so transformers runs it, slower than a server would; compare servers with "
            "draftlab score --server"
        )
    else:
        model = llama.load(directory, dtype, device)
        model.pard_token = parallel.pard_token(directory)
        return model
    return hosted(checkpoint.load_model(directory, dtype, device).eval())


def engine_runs(directory: Path) -> bool:
    """Return whether draftlab's engine runs a checkpoint; otherwise transformers does."""
    try:
        llama.check_supported(directory)
    except (OtherArchitecture, Quantised):
        return False
    return True


def hosted(model: PreTrainedModel) -> HFDecoder:
    """Return a transformers model as a Decoder."""
    return RecurrentDecoder(model) if has_layers(model, RECURRENT) else HFDecoder(model)


def check_mode(mode: Mode, device: torch.device, dtype: torch.dtype) -> None:
    """Print a note if the dtype is slow in this mode. Raises UserError: the mode does not support device or dtype."""
    if mode == "native":
        native_cpu.check(device, dtype)
    if mode == "eager" and not checkpoint.is_fast(dtype, device):
        _note_slow(checkpoint.dtype_name(dtype))
    if mode == "graphs" and device.type != "cuda":
        raise UserError(
            f"--mode graphs needs a CUDA device, and this is {device.type}; use --mode eager or native"
        )


@functools.cache  # so that the note is printed once for target and drafts
def _note_slow(dtype: str) -> None:
    note(f"mode eager is slow in {dtype} on this CPU; use --mode native or --dtype float32")


def resolve_mode(
    mode: Mode | Literal["auto"], device: torch.device, dtype: torch.dtype, models: Iterable[Path]
) -> Mode:
    """Return the mode. "auto" is graphs on CUDA and native on a CPU, or eager with a note if a model needs that."""
    if mode != "auto":
        return mode
    try:
        for directory in models:
            llama.check_supported(directory)
        if device.type == "cuda":
            return "graphs"
        native_cpu.check(device, dtype)
        native_cpu.library()
    except UserError as error:
        note(f"mode eager: {error}")
        return "eager"
    return "native"


def with_mode(model: llama.Llama, mode: Mode, int8: bool = False) -> llama.Llama:
    """Return the model with passes in a mode. int8: Whether to round weights to int8, in mode native only.

    Raises:
        UserError: the mode does not run on this device or with this dtype, or int8 is set in another mode.
    """
    check_mode(mode, model.device, model.embed.dtype)
    if mode == "native":
        return NativeLlama(model, int8)
    if int8:
        raise UserError(
            f"int8 weights need mode native, and this is mode {mode}; use --mode native"
        )
    return CudaGraphLlama(model) if mode == "graphs" else model


def in_native_mode(model: Decoder, dtype: torch.dtype, purpose: str) -> Decoder:
    """Return the model in mode native on a CPU. If native cannot run, print a note and return the model unchanged.

    purpose: The caller's work for the note, such as "evaluating".
    """
    if not isinstance(model, llama.Llama) or model.device.type != "cpu" or dtype == torch.float16:
        return model
    try:
        return with_mode(model, "native")
    except UserError as error:
        note(f"{error}; {purpose} in mode eager")
        return model
