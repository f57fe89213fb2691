"""Load decoders, and choose the mode in which their passes run: torch, compiled C++ or CUDA graphs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from draftlab.console import note
from draftlab.errors import OtherArchitecture, Quantised, UserError
from draftlab.model import Mode, checkpoint, devices, llama, native_cpu, parallel, precision
from draftlab.model.cuda_graphs import CudaGraphLlama
from draftlab.model.decoder import Decoder
from draftlab.model.hf_decoder import RECURRENT, HFDecoder, has_layers
from draftlab.model.native_cpu import NativeLlama
from draftlab.model.recurrent_decoder import RecurrentDecoder


def load(directory: Path, dtype: torch.dtype, device: torch.device, device_map: str | None = None) -> Decoder:
    """Load a checkpoint into draftlab's engine, or into transformers if the engine cannot run it.

    device_map: Same as in checkpoint.load_model. If set, transformers runs the model.

    Raises:
        UserError: the errors of llama.check_supported and checkpoint.load_model.
    """
    if device_map is not None:
        return hosted(checkpoint.load_model(directory, dtype, device, device_map).eval())
    try:
        llama.check_supported(directory)
    except OtherArchitecture as error:
        note(f"{error}; transformers runs the model instead")
    except Quantised:
        note(
            f"{directory} is quantised, so transformers runs the model, slower than a server would; to measure on a "
            "server, use draftlab score --server URL"
        )
    else:
        model = llama.load(directory, dtype, device)
        model.pard_token = parallel.pard_token(directory)
        return model
    return hosted(checkpoint.load_model(directory, dtype, device).eval())


def engine_runs(directory: Path) -> bool:
    """Return whether draftlab's engine can run a checkpoint. If not, transformers runs it."""
    try:
        llama.check_supported(directory)
    except (OtherArchitecture, Quantised):
        return False
    return True


def hosted(model: PreTrainedModel) -> HFDecoder:
    """Wrap a transformers model as a Decoder."""
    return RecurrentDecoder(model) if has_layers(model, RECURRENT) else HFDecoder(model)


def check_mode(mode: Mode, device: torch.device, dtype: torch.dtype) -> None:
    """Check that a mode supports device and dtype.

    Raises:
        UserError: the mode does not support the device or the dtype.
    """
    if mode == "native":
        native_cpu.check(device, dtype)
    if mode == "graphs" and device.type != "cuda":
        raise UserError(f"--mode graphs needs a CUDA device, but the device is {device.type}; use --mode auto")


def set_threads(mode: Mode, threads: int | None) -> None:
    """Set the number of CPU threads of torch, whose passes a mode shares. None leaves it, unless a mode has only one.

    Raises:
        UserError: mode native cannot run, or not on so many threads.
    """
    if mode == "native":
        _check_threads(threads)
        if not native_cpu.has_threads():
            threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def _check_threads(threads: int | None) -> None:
    """Check that mode native runs on this machine, and on so many CPU threads. Raises UserError: it does not."""
    if not native_cpu.has_threads() and threads is not None and threads > 1:
        raise UserError(
            f"--threads {threads}: mode native runs on one thread here, because the C++ compiler has no OpenMP; leave "
            "--threads out, add --mode eager, or set CXX to a compiler with OpenMP"
        )


def resolve(
    mode: Mode | Literal["auto"],
    dtype: str,
    device: torch.device,
    target: Path | None,
    models: Iterable[Path],
    *,
    hosted: bool = False,
    threads: int | None = None,
    int8: bool = False,
) -> tuple[Mode, precision.DtypeChoice]:
    """Return the mode and the dtype in which passes run, and print a note that says why it is this dtype.

    The dtype "auto" depends on the mode, see precision.choose. A target that transformers runs counts as one in mode
    eager.

    Args:
        dtype: Name of a dtype, or "auto".
        target: Checkpoint whose stored dtype "auto" prefers. None stands for one in bfloat16.
        models: Checkpoints that run in the mode.
        hosted: Whether transformers runs the target.
        threads, int8: Same as in resolve_mode.

    Raises:
        UserError: the errors of resolve_mode.
    """
    if hosted:
        choice = precision.choose(dtype, device, "eager", target, threads=threads)
        resolved = resolve_mode(mode, device, choice.dtype, models, threads=threads, int8=int8)
    else:
        named = devices.DTYPES.get(dtype)
        resolved = resolve_mode(mode, device, named, models, threads=threads, int8=int8)
        choice = precision.choose(dtype, device, resolved, target, threads=threads)
    reason = choice.reason
    if dtype != "auto":
        runs = "eager" if hosted else resolved
        reason = precision.slowness(choice.dtype, device, runs, threads)
    if reason:
        note(f"dtype {devices.dtype_name(choice.dtype)}: {reason}")
    return resolved, choice


def resolve_mode(
    mode: Mode | Literal["auto"],
    device: torch.device,
    dtype: torch.dtype | None,
    models: Iterable[Path],
    *,
    threads: int | None = None,
    int8: bool = False,
) -> Mode:
    """Return the mode in which passes run. A mode other than "auto" is returned unchanged.

    "auto" stands for graphs on a CUDA device, and for native on a CPU. If that mode does not support a model, the dtype
    or this machine, "auto" stands for eager, and a note says why.

    Args:
        dtype: Dtype of the passes. None: any dtype that the mode supports.
        models: Checkpoints that run in the mode.
        threads: Number of CPU threads, see set_threads.
        int8: Whether weights are rounded to int8, which only mode native can.

    Raises:
        UserError: mode native is asked for, or int8, and this machine does not support it.
    """
    wanted = dtype or torch.float32  # every mode supports float32
    if mode == "native":
        native_cpu.check(device, wanted)
        _check_threads(threads)
    if mode != "auto":
        return mode
    try:
        for directory in models:
            llama.check_supported(directory)
        if device.type == "cuda" and not int8:
            return "graphs"
        native_cpu.check(device, wanted)
        _check_threads(threads)
    except UserError as error:
        if int8:
            raise UserError(f"--int8 needs mode native: {error}") from None
        note(f"models run in mode eager, because of this limit: {error}")
        return "eager"
    return "native"


def with_mode(model: llama.Llama, mode: Mode, int8: bool = False) -> llama.Llama:
    """Return the model with passes that run in a mode. int8: Whether to round weights to int8, in mode native only.

    Raises:
        UserError: the mode does not run on this device or with this dtype, or int8 is set in another mode.
    """
    check_mode(mode, model.device, model.embed.dtype)
    if mode == "native":
        return NativeLlama(model, int8)
    if int8:
        raise UserError(f"--int8 needs mode native, but the mode is {mode}; use --mode native")
    return CudaGraphLlama(model) if mode == "graphs" else model


def in_native_mode(model: Decoder, dtype: torch.dtype) -> Decoder:
    """Return a decoder of the model that runs in mode native if possible, else the model itself.

    Only a Llama on the CPU can run in mode native, and only if `dtype` is not float16. If mode native fails on this
    machine, the model is returned unchanged, and a note says why.
    """
    if not isinstance(model, llama.Llama) or model.device.type != "cpu" or dtype == torch.float16:
        return model
    try:
        return with_mode(model, "native")
    except UserError as error:
        note(f"the model runs in mode eager, because of this limit: {error}")
        return model
