"""Compiled C++ for passes of llama.py with few tokens on CPUs.

In such a pass, Python would take longer than the products of its small matrices. native_cpu.cpp is compiled on first
use. It reads the model's own weights, or weights rounded to int8 with a scale for each output. The logits of a text do
not depend, in any bit, on T or on the other texts of the batch.

B rows (texts of a batch), T new tokens, V vocab.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from draftlab.console import note
from draftlab.errors import UserError, one_line
from draftlab.model import devices
from draftlab.model.decoder import Tree, end_of_pass
from draftlab.model.llama import Block, Cache, Llama
from draftlab.model.processor import instructions, processor_model, read_cpuinfo
from draftlab.runs import provenance
from draftlab.runs.atomic import replacing, write_atomic

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
# without it, the engine runs on one thread: Apple's clang refuses it
OPENMP = "-fopenmp"
TRIAL_SECONDS = 60.0
# Clang on Arm has only -mcpu
TUNED = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
# Most tokens of a compiled pass, except where any_width is true. For more tokens, torch is as fast, and faster on CPUs
# with matrix tiles (AMX).
WIDE = 128


# messages about the values of enum Fault in native_cpu.cpp
FAULTS = (
    "",
    "the id {} has no row in the embedding, which has {} rows",
    "token {} of the tree must see exactly itself and as many earlier tokens as its depth says",
)
# dtypes of token ids and depths
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _fields(kind: type, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Matrix(Structure):
    _fields_ = _fields(c_void_p, "weights", "scale", "bias")


class _Layer(Structure):
    _fields_ = (
        *_fields(_Matrix, "qkv", "o", "gate_up", "down"),
        *_fields(c_void_p, "input_norm", "post_norm", "q_norm", "k_norm"),
        *_fields(c_void_p, "attention_norm", "mlp_norm"),
    )


class _Model(Structure):
    _fields_ = (
        *_fields(c_int, "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"),
        *_fields(c_int, "threads", "embedded"),
        ("eps", c_float),
        *_fields(c_void_p, "embed", "norm", "cos", "sin"),
        ("head", _Matrix),
        ("layer", POINTER(_Layer)),
        ("hidden_norm", c_void_p),
        *_fields(c_int, "norm_before_residual", "window", "whole_qk_norm", "head_size"),
        ("head_ids", c_void_p),
    )


class _Pass(Structure):
    _fields_ = (
        *_fields(c_int, "rows", "width", "last", "capacity"),
        *_fields(c_void_p, "ids", "used", "depth", "sees", "keys", "values", "logits", "states"),
        *_fields(c_void_p, "layer_states", "layer_at"),
        ("layers_kept", c_int),
    )


class NativeLlama(Llama):
    """A Llama on the CPU whose passes run in compiled C++, or in torch where torch is faster.

    It shares the Llama's weights.
    """

    def __init__(self, model: Llama, int8: bool = False) -> None:
        """Make a native model of a Llama. int8: Whether to round weights to int8.

        Raises:
            UserError: the model is not on the CPU in float32 or bfloat16, or the C++ cannot be compiled.
        """
        dtype = check(model.device, model.embed.dtype)
        vars(self).update(vars(model))
        self.int8 = int8
        # whether passes of any width run in C++, because torch lacks int8 weights or is slower in this dtype: with
        # AVX512_BF16 and without matrix tiles, torch took 1.2 to 1.5 times as long for a text on an AMD EPYC
        pairs_only = {"avx512_bf16", "amx_bf16"} & {*instructions(read_cpuinfo())} == {"avx512_bf16"}
        self.any_width = (
            int8
            or not devices.is_fast(model.embed.dtype, model.device)
            or (model.embed.dtype == torch.bfloat16 and pairs_only)
        )
        self._run: Callable[..., int] = getattr(library(), f"run_{'int8_' if int8 else ''}{dtype}")
        self._tensors: list[Tensor] = []  # these tensors must outlive the C structures that point to them
        self._positions = 0  # length of the rotary tables that C++ reads
        self._tables: list[Tensor] = []
        self._model = self._structure()

    @property
    def weights_dtype(self) -> str | None:
        return "int8" if self.int8 else None

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, last: int = 0, tree: Tree | None = None) -> Tensor:
        """Run a pass, see Llama.forward. Passes in compiled C++ return float32 logits."""
        if ids.numel() > WIDE and not self.any_width:
            return super().forward(ids, cache, last, tree)
        return self.narrow_pass(ids, cache, last, tree)

    def narrow_pass(
        self, ids: Tensor, cache: Cache, last: int, tree: Tree | None, states: Tensor | None = None
    ) -> Tensor:
        """Run a pass in compiled C++, and return float32 logits, see Llama.forward.

        states: States that an EAGLE-3 head reads, float32 [B, T, D]. They are overwritten by its new states.

        Raises:
            ValueError: C++ would read or write beyond a tensor: an id has no row in the embedding, a tree or a length
                is wrong, or a tensor has another dtype or size. Then nothing is written.
        """
        if ids.ndim != 2 or not ids.numel():
            raise ValueError(f"ids has the size {tuple(ids.shape)}, but must be [B, T] with a token")
        rows, width = ids.shape
        shape = self.shape
        capacity = cache.capacity
        last = last or width
        if not 0 < last <= width:
            raise ValueError(f"last is {last}, but must be from 0 to the {width} tokens of a row")
        self._follow_tables()
        if end_of_pass(cache, width) > self._positions:
            raise ValueError(f"positions {cache.used} exceed the model's {self._positions}")
        if len(cache.used) != rows:
            raise ValueError(f"cache.used has {len(cache.used)} rows, but ids has {rows}")
        if (states is None) != (self.hidden_norm is None):
            raise ValueError("only an EAGLE-3 head reads states, and it reads one with each token")
        ids = _checked("ids", ids, INTEGERS, (rows, width)).long().contiguous()
        used = (c_int64 * rows)(*cache.used)
        dtype = self.embed.dtype
        hidden = shape.hidden
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        tree_data = (None, None)
        if tree is not None:
            _checked("tree.depth", tree.depth, INTEGERS, (width,), (rows, width))
            _checked("tree.mask", tree.mask, (torch.bool,), (width, width), (rows, width, width))
            depth = tree.depth.long().expand(rows, width).contiguous()
            mask = tree.mask.expand(rows, width, width).contiguous()
            tree_data = (depth.data_ptr(), mask.data_ptr())
        states_data = (None, None)
        stored = cache.layer_states
        if stored is not None:
            if not all(0 <= layers <= shape.layers for layers in stored.ids):
                raise ValueError(f"layer_states.ids is {stored.ids}, but must be from 0 to {shape.layers}")
            layer_at = (c_int * (shape.layers + 1))(*[-1] * (shape.layers + 1))
            for at, layers in enumerate(stored.ids):
                layer_at[layers] = at
            kept = (rows, capacity, len(stored.ids) * hidden)
            states_data = (
                _written("layer_states", stored.states, dtype, kept),
                ctypes.addressof(layer_at),
            )
        logits = torch.empty(rows, last, self.vocab)
        step = _Pass(
            rows,
            width,
            last,
            capacity,
            ids.data_ptr(),
            ctypes.addressof(used),
            *tree_data,
            _written("cache.keys", cache.keys, dtype, size),
            _written("cache.values", cache.values, dtype, size),
            logits.data_ptr(),
            None if states is None else _written("states", states, torch.float32, (rows, width, hidden)),
            *states_data,
            0 if stored is None else len(stored.ids),
        )
        self._model.threads = torch.get_num_threads()
        wrong = c_int64()
        fault = self._run(ctypes.byref(self._model), ctypes.byref(step), ctypes.byref(wrong))
        if fault:
            raise ValueError(FAULTS[fault].format(wrong.value, self._model.embedded))
        cache.used = [used + width for used in cache.used]
        return logits

    def _follow_tables(self) -> None:
        """Point C++ to the rotary tables, which a cache for longer texts makes longer."""
        if self._positions == len(self.rope.cos):
            return
        self._positions = len(self.rope.cos)
        size = (self._positions, self.shape.head_dim)
        self._tables = [
            _checked("rotary", table, (self.embed.dtype, torch.float32), size).float().contiguous()
            for table in (self.rope.cos, self.rope.sin)
        ]
        self._model.cos, self._model.sin = (table.data_ptr() for table in self._tables)

    def _structure(self) -> _Model:
        s = self.shape
        outputs = s.vocab if self.head_ids is None else len(self.head_ids)
        layers = (_Layer * s.layers)(*(self._layer(i, block) for i, block in enumerate(self.blocks)))
        return _Model(
            s.layers,
            s.hidden,
            s.heads,
            s.kv_heads,
            s.head_dim,
            s.ffn,
            self.vocab,
            1,
            len(self.embed),
            self.eps,
            self._kept(_checked("embed", self.embed, (self.embed.dtype,), (len(self.embed), s.hidden))),
            self._floats(self.norm, s.hidden),
            None,
            None,
            self._matrix(self.head, None, outputs, s.hidden),
            layers,
            self._floats(self.hidden_norm, s.hidden),
            self.norm_before_residual,
            self.window or 0,
            s.whole_qk_norm,
            outputs,
            self._ids_of_head(),
        )

    def _layer(self, index: int, block: Block) -> _Layer:
        s = self.shape
        q = s.heads * s.head_dim
        kv = s.kv_heads * s.head_dim
        inputs = s.hidden if self.hidden_norm is None or index else 2 * s.hidden
        q_norm, k_norm = block.qk_norm or (None, None)
        return _Layer(
            self._matrix(block.qkv, block.qkv_bias, q + 2 * kv, inputs),
            self._matrix(block.o, block.o_bias, s.hidden, q),
            self._matrix(block.gate_up, block.gate_up_bias, 2 * s.ffn, s.hidden),
            self._matrix(block.down, block.down_bias, s.hidden, s.ffn),
            self._floats(block.input_norm, s.hidden),
            self._floats(block.post_norm, s.hidden),
            self._floats(q_norm, q if s.whole_qk_norm else s.head_dim),
            self._floats(k_norm, kv if s.whole_qk_norm else s.head_dim),
            self._floats(block.attention_norm, s.hidden),
            self._floats(block.mlp_norm, s.hidden),
        )

    def _matrix(self, weights: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> _Matrix:
        _checked("a matrix", weights, (self.embed.dtype,), (outputs, inputs))
        scale = None
        if self.int8:
            weights, scale = round_int8(weights)
        return _Matrix(self._kept(weights), self._floats(scale, outputs), self._floats(bias, outputs))

    def _floats(self, values: Tensor | None, *size: int) -> int | None:
        if values is None:
            return None
        floats = (self.embed.dtype, torch.float32)
        return self._kept(_checked("a weight", values, floats, size).float())

    def _ids_of_head(self) -> int | None:
        if self.head_ids is None:
            return None
        ids = _checked("head_ids", self.head_ids, INTEGERS, (len(self.head_ids),)).long()
        outside = ids[(ids < 0) | (ids >= self.vocab)].tolist()
        if outside:
            raise ValueError(f"head_ids has the id {outside[0]}, but the vocabulary has {self.vocab} ids")
        return self._kept(ids)

    def _kept(self, values: Tensor) -> int:
        """Return a pointer to the values, which are kept in memory as long as the model."""
        self._tensors.append(values.contiguous())
        return self._tensors[-1].data_ptr()


def _checked(name: str, values: Tensor, dtypes: tuple[torch.dtype, ...], *sizes: tuple[int, ...]) -> Tensor:
    """Return a tensor that C++ reads. Raises ValueError: C++ expects another dtype, size or device."""
    if values.dtype not in dtypes or values.shape not in sizes or not values.is_cpu:
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)} on {values.device}, but must be "
            f"{' or '.join(map(str, dtypes))} {' or '.join(map(str, sizes))} on cpu"
        )
    return values


def _written(name: str, values: Tensor, dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Return a pointer to a tensor that C++ reads and writes.

    Raises:
        ValueError: the errors of _checked, or the tensor is not contiguous.
    """
    if not values.is_contiguous():
        raise ValueError(f"{name} has the strides {values.stride()}, but must be contiguous")
    return _checked(name, values, (dtype,), size).data_ptr()


def round_int8(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [out, in] to int8. Return the rounded matrix, and the scale of each output, float32 [out]."""
    scale = weights.float().abs().amax(1).clamp_min(1e-12) / 127
    return (weights.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


def check(device: torch.device, dtype: torch.dtype) -> str:
    """Check that mode native supports device and dtype, and return the dtype's name.

    Raises:
        UserError: the device is not the CPU, or the dtype is neither float32 nor bfloat16.
    """
    name = devices.dtype_name(dtype)
    if device.type != "cpu" or name not in ("float32", "bfloat16"):
        raise UserError(
            f"mode native runs only float32 and bfloat16 on a CPU, not {name} on {device.type}; --mode eager has no "
            "such limit"
        )
    return name


@cache
def library() -> ctypes.CDLL:
    """Return the library of native_cpu.cpp, compiled for this processor on first use.

    Every compiler of this machine is tried with OpenMP, then without. The library is stored in the user's cache folder.
    If that fails, or if other users can write to the folder, each process compiles the library again.

    Raises:
        UserError: there is no compiler, or none makes a library that can be loaded.
    """
    problems = list[str]()
    named = _compiler_of_environment()
    for openmp in (OPENMP,), ():
        for compiler in [*([named] if named else []), *_compilers()]:
            try:
                found = _library_of([*compiler, *FLAGS, *openmp, TUNED, str(SOURCE)])
            except UserError as error:
                prefix = "CXX=" if compiler is named else ""
                problems.append(f"{prefix}{shlex.join(compiler)}: {error}")
                continue
            if named and compiler is not named:
                note(f"{compiler[0]} compiles mode native, because of {problems[0]}")
            if not found.uses_openmp():
                note(f"mode native runs on one thread, because of {problems[0]}")
            return found
    if not problems:
        raise UserError(
            "mode native needs a C++ compiler, but neither c++, g++ nor clang++ is on PATH; install g++, set CXX, or "
            "add --mode eager to score or profile"
        )
    raise UserError(
        f"mode native cannot be compiled ({problems[0]}); set CXX to another compiler, or add --mode eager to score "
        "or profile"
    )


def has_threads() -> bool:
    """Return whether passes in compiled C++ can use several threads. Raises UserError: the errors of library."""
    return bool(library().uses_openmp())


def _compiler_of_environment() -> list[str] | None:
    """Return the words of the variable CXX, which may have a wrapper such as ccache, and options.

    Raises:
        UserError: CXX is not a command.
    """
    text = os.environ.get("CXX", "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"the environment variable CXX={text} is not a command: {error}") from None
    return [shutil.which(words[0]) or words[0], *words[1:]] if words else None


def _compilers() -> list[list[str]]:
    """Return the C++ compilers on PATH that compile for this machine: plain names, then names with a version or prefix.

    A prefix, such as x86_64-conda-linux-gnu-, names the machine that a compiler compiles for. Each program counts once.
    """
    machine = r"aarch64|arm64" if platform.machine() in ("aarch64", "arm64") else platform.machine()
    system = {"Linux": "linux", "Darwin": "darwin"}.get(platform.system(), platform.system())
    name = re.compile(rf"((?:{machine})-[\w.-]*{system}[\w.-]*-)?(c\+\+|g\+\+|clang\+\+)(?:-([\d.]+))?")
    found = list[tuple[tuple[object, ...], Path]]()
    folders = filter(None, os.environ.get("PATH", os.defpath).split(os.pathsep))
    for at, folder in enumerate(folders):
        with contextlib.suppress(OSError):
            for file in Path(folder).iterdir():
                parts = name.fullmatch(file.name)
                if parts and shutil.which(file):
                    prefix, kind, version = parts.groups()
                    versions = [-int(number) for number in re.findall(r"\d+", version or "")]
                    kinds = ("c++", "g++", "clang++").index(kind)
                    order = (bool(prefix or version), bool(prefix), kinds, versions, at, file.name)
                    found.append((order, file))
    programs = dict[tuple[Path, str], Path]()
    for _, file in sorted(found):
        program = file.resolve()
        # a wrapper such as ccache, to which names of several compilers are linked, runs the one it is called by
        wrapped = "" if "++" in program.name or "clang" in program.name else file.name
        programs.setdefault((program, wrapped), file)
    return [[str(file)] for file in programs.values()]


def _library_of(command: list[str]) -> ctypes.CDLL:
    """Return the library that a command compiles, from the user's cache folder if possible.

    Raises:
        UserError: the command fails, or its library cannot be loaded.
    """
    cpuinfo = read_cpuinfo()
    key = [SOURCE.read_bytes(), command, processor_model(cpuinfo), instructions(cpuinfo)]
    name = f"native-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so"
    try:
        return _compiled(command, private_folder() / name)
    except (OSError, RuntimeError) as error:
        reason = one_line(error)
    try:
        with tempfile.TemporaryDirectory(prefix="draftlab-") as folder:
            found = _compiled(command, Path(folder) / name)
    except OSError as error:
        raise UserError(f"what it compiles cannot be stored and loaded ({reason}; {one_line(error)})") from None
    note(f"each process compiles {SOURCE.name} again, because the compiled library cannot be stored: {reason}")
    return found


def private_folder() -> Path:
    """Return draftlab's folder in the user's cache folder. It is created unless it exists.

    Raises:
        OSError: the folder cannot be created, or other users can write to it.
        RuntimeError: the user has no home directory.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftlab"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.is_symlink() or not is_ours(folder):
        raise PermissionError(f"other users can write to {folder}")
    return folder


def is_ours(path: Path) -> bool:
    """Return whether a file or folder belongs to this user, and no other user can write to it."""
    info = path.stat()
    return info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _compiled(command: list[str], file: Path) -> ctypes.CDLL:
    """Load the library from a file. Compile it first if the file is missing, changed, or not the user's own.

    Raises:
        OSError: the library cannot be stored or loaded.
        UserError: the compiler fails.
    """
    digest = file.with_suffix(".sha256")
    with FileLock(file.with_suffix(".lock")):
        known = all(path.is_file() and is_ours(path) for path in (file, digest))
        if not known or digest.read_text() != provenance.file_sha256(file):
            _try(command, file.parent)
            note(f"compiling {SOURCE.name} for mode native, once per machine")
            with replacing(file) as part:
                _compile(command, part)
                part.chmod(0o755)
                ctypes.CDLL(str(part))
                write_atomic(digest, provenance.file_sha256(part))
    return ctypes.CDLL(str(file))


def _try(command: list[str], parent: Path) -> None:
    """Compile and load an empty file, which fails at once if the compiler refuses an option or `parent` is noexec.

    Raises:
        OSError: the library cannot be stored or loaded.
        UserError: the compiler fails, or does not end.
    """
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        source = Path(folder) / "empty.cpp"
        built = Path(folder) / "empty.so"
        source.touch()
        _compile([*command[:-1], str(source)], built, TRIAL_SECONDS)
        ctypes.CDLL(str(built))


def _compile(command: list[str], built: Path, seconds: float | None = None) -> None:
    """Run a compiler. Raises UserError with its reason: it fails, or does not end in `seconds` seconds."""
    try:
        done = subprocess.run(
            [*command, "-o", str(built)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        raise UserError(f"it cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"it compiles an empty file for more than {seconds:.0f} s") from None
    if done.returncode:
        raise UserError(one_line(done.stderr) or f"it ends with exit code {done.returncode}")
