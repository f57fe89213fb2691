"""Choose the dtype of weights by the speed of passes here. They are timed once per machine and mode."""

import contextlib
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.model import Mode, checkpoint, devices, llama, native_cpu
from draftlab.model.processor import instructions, processor_model, read_cpuinfo
from draftlab.model.shape import Shape
from draftlab.quantities import format_number
from draftlab.reading import read_object
from draftlab.runs.atomic import write_atomic

# 63 million weights, 126 MB in 16 bits, which exceed the caches that a core can use
SHAPE = Shape(layers=8, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=2048, vocab=8192, tied=True)
DTYPES: dict[Mode, tuple[str, ...]] = {
    "native": ("float32", "bfloat16"),
    "eager": ("float32", "bfloat16", "float16"),
}
# Number of passes by their tokens. A request reads 128 tokens and then decodes, with and without a draft. Text that is
# read, or that is written in batches, has only wide passes.
DECODING = {1: 16, 4: 16, 32: 4}
READING = {32: 1}
SECONDS = 1.0  # of measured rounds
ROUNDS = (3, 9)  # fewest and most measured rounds
# a dtype that is emulated: in the first round, a pass takes so many times as long as in float32; it is timed no further
EMULATED = 3.0
# The fastest of several interleaved passes varied by up to 3 % between processes on a machine with other work. A dtype
# that is slower by less counts as equally fast.
NOISE = 1.05
Milliseconds = dict[str, dict[int, float]]  # of a pass, by dtype and by tokens


@dataclass(frozen=True, slots=True)
class Speeds:
    """Milliseconds of a pass in a mode on this machine, by dtype and by the tokens of the pass."""

    mode: Mode
    passes: Milliseconds

    def over_float32(self, dtype: str, passes: Mapping[int, int] = DECODING) -> float:
        """Return the speed of passes in a dtype, divided by their speed in float32.

        passes: Number of passes by their tokens.
        """
        float32, other = (
            sum(count * self.passes[name][tokens] for tokens, count in passes.items()) for name in ("float32", dtype)
        )
        return float32 / other

    def describe(self) -> str:
        return ", ".join(
            f"{dtype} {format_number(self.over_float32(dtype), 2)} "
            f"({format_number(ms[1])} ms for 1 token, {format_number(ms[32])} ms for 32)"
            for dtype, ms in self.passes.items()
        )


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype, and the reason for it, or "" if there was no choice."""

    dtype: torch.dtype
    reason: str = ""


def choose(
    name: str,
    device: torch.device,
    mode: Mode,
    directory: Path | None,
    *,
    threads: int | None = None,
    passes: Mapping[int, int] = DECODING,
) -> DtypeChoice:
    """Return the dtype with a name from devices.DTYPES, or the dtype that "auto" stands for.

    "auto" is bfloat16 on a GPU. On a CPU in mode native it is the dtype in which a checkpoint is stored, if passes are
    at least as fast in it as in float32, and else float32. In mode eager on a CPU it is float32: there, logits in 16
    bits depend on the number of tokens in a pass, so that a draft would change the text where two tokens are close.

    Args:
        directory: Checkpoint of the target. None stands for a checkpoint in bfloat16, as most are.
        threads: Number of CPU threads. None: the number is not changed.
        passes: Number of passes by their tokens.
    """
    if name != "auto":
        return DtypeChoice(devices.DTYPES[name])
    if device.type != "cpu":
        return DtypeChoice(devices.resolve_dtype(name, device), "the default on a GPU")
    stored = torch.bfloat16 if directory is None else _stored(directory)
    wanted = devices.dtype_name(stored)
    source = "as most checkpoints are stored" if directory is None else "as stored"
    if wanted == "float32":
        return DtypeChoice(torch.float32, source)
    if wanted not in DTYPES[mode]:
        return DtypeChoice(torch.float32, f"mode {mode} does not run {wanted} on a CPU")
    if mode == "eager":
        return DtypeChoice(
            torch.float32,
            f"in mode eager, logits in {wanted} depend on the number of tokens in a pass, and texts with them",
        )
    ratio = speeds(mode, threads).over_float32(wanted, passes)
    here = f"as fast as float32 in mode {mode} here"
    if ratio * NOISE >= 1:
        return DtypeChoice(
            stored,
            f"{source}, and {f'{format_number(ratio, 2)} times ' if ratio > NOISE else ''}{here}",
        )
    return DtypeChoice(torch.float32, f"{wanted}, {source}, is only {format_number(ratio, 2)} times {here}")


def reads_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch reads text in a dtype at least as fast as in float32. On a CPU, passes of it are timed.

    A dtype that is emulated here, see devices.is_fast, is not timed.
    """
    if device.type != "cpu" or dtype.itemsize > 2 or not devices.is_fast(dtype, device):
        return devices.is_fast(dtype, device)
    ratio = speeds("eager").over_float32(devices.dtype_name(dtype), READING)
    return ratio * NOISE >= 1


def slowness(dtype: torch.dtype, device: torch.device, mode: Mode, threads: int | None) -> str:
    """Return text about how slow decoding is in a dtype here, or "" if it is not slower than in float32."""
    name = devices.dtype_name(dtype)
    if device.type != "cpu" or name == "float32" or name not in DTYPES[mode]:
        return ""
    ratio = speeds(mode, threads).over_float32(name)
    return "" if ratio * NOISE >= 1 else f"{format_number(ratio, 2)} times as fast as float32 in mode {mode} here"


def _stored(directory: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's weights. If only config.json is here, as in a dry run, return its dtype."""
    if any(directory.glob("*.safetensors")):
        return checkpoint.stored_dtype(directory)
    config = checkpoint.read_config(directory)
    return devices.DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)


def speeds(mode: Mode, threads: int | None = None) -> Speeds:
    """Return the speeds of a mode on this CPU, from the user's cache folder or else measured.

    A file that cannot be read or written does not matter: the speeds are then measured again.

    threads: Number of CPU threads. None: the number is not changed.

    Raises:
        UserError: mode native cannot run on this machine.
    """
    if mode == "native" and not native_cpu.has_threads():
        threads = 1
    return _speeds(mode, threads or torch.get_num_threads())


@functools.cache
def _speeds(mode: Mode, threads: int) -> Speeds:
    file = None
    with contextlib.suppress(OSError, RuntimeError):
        file = native_cpu.private_folder() / f"speeds-{_key(mode, threads)}.json"
        if native_cpu.is_ours(file) and (passes := _read(file, mode)):
            return Speeds(mode, passes)
    note(f"timing passes in mode {mode} on {threads} thread{'' if threads == 1 else 's'}, once per machine")
    with _on_threads(threads):
        passes = _measure(mode, time.process_time if threads == 1 else time.perf_counter)
    if file is not None:
        with contextlib.suppress(OSError):
            write_atomic(file, json.dumps(passes, indent=1))
    return Speeds(mode, passes)


def _key(mode: Mode, threads: int) -> str:
    """Return a hash of all that the speeds depend on. The name of mode native's library names its code and compiler."""
    cpuinfo = read_cpuinfo()
    built = Path(native_cpu.library()._name).name if mode == "native" else torch.__version__
    key = [
        mode,
        threads,
        built,
        processor_model(cpuinfo),
        instructions(cpuinfo),
        SHAPE.model_dump(),
    ]
    return hashlib.sha256(repr([*key, sorted(DECODING)]).encode()).hexdigest()[:16]


def _read(file: Path, mode: Mode) -> Milliseconds | None:
    """Return the speeds in a file, or None if they are not those that _measure writes."""
    try:
        stored: Any = read_object(file)
        passes = {dtype: {tokens: float(stored[dtype][str(tokens)]) for tokens in DECODING} for dtype in DTYPES[mode]}
    except (UserError, KeyError, TypeError, ValueError):
        return None
    positive = (0 < ms < math.inf for each in passes.values() for ms in each.values())
    return passes if all(positive) else None


@contextlib.contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _measure(mode: Mode, clock: Callable[[], float]) -> Milliseconds:
    """Return the milliseconds of the fastest pass of each dtype and width. Rounds of all passes are interleaved."""
    models = {dtype: _model(mode, devices.DTYPES[dtype]) for dtype in DTYPES[mode]}
    fastest = {dtype: dict.fromkeys(DECODING, math.inf) for dtype in models}
    started = time.perf_counter()
    least, most = ROUNDS
    for number in range(most + 1):
        for dtype, model in models.items():
            for tokens in DECODING:
                ids = torch.ones(1, tokens, dtype=torch.long)
                cache = model.new_cache(1, tokens)
                start = clock()
                model.forward(ids, cache, last=1)
                fastest[dtype][tokens] = min(fastest[dtype][tokens], 1e3 * (clock() - start))
        if number == 0:  # a warm-up
            limit = {tokens: EMULATED * ms for tokens, ms in fastest["float32"].items()}
            for dtype in [*models]:
                if any(ms > limit[tokens] for tokens, ms in fastest[dtype].items()):
                    del models[dtype]
        if number >= least and time.perf_counter() - started > SECONDS:
            break
    return fastest


def _model(mode: Mode, dtype: torch.dtype) -> llama.Llama:
    """Return a model of SHAPE, with equal weights, because the time of a pass does not depend on their values."""
    weights = {
        name: torch.full(SHAPE.dims(axes), 1 / SHAPE.dims(axes)[-1], dtype=dtype) for name, axes in SHAPE.axes().items()
    }
    frequencies = 10000.0 ** -(torch.arange(0, SHAPE.head_dim, 2) / SHAPE.head_dim)
    model = llama.Llama(SHAPE, weights, frequencies, 1.0, 1e-6, max(DECODING))
    return native_cpu.NativeLlama(model) if mode == "native" else model
