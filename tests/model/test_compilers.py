"""Mode native is compiled by any compiler of this machine, and where it cannot be, the reason is said."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.builders import build
from helpers.errors import raises_option

from draftlab.model import llama, modes, native_cpu

GCC = shutil.which("g++")
pytestmark = pytest.mark.skipif(GCC is None, reason="no g++")
MACHINE = platform.machine()
OTHER = "aarch64" if MACHINE == "x86_64" else "x86_64"
# a stand-in for native_cpu.cpp that compiles fast
SMALL = """
extern "C" int uses_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
"""
LOGITS = """
import sys, torch
from pathlib import Path
from test_compilers import logits
from draftlab.model import modes
modes.set_threads("native", None)
torch.save([logits(Path(sys.argv[1])), torch.get_num_threads()], sys.argv[2])
"""


def logits(directory: Path) -> torch.Tensor:
    model = native_cpu.NativeLlama(llama.load(directory, torch.float32))
    return model.forward(torch.arange(3, 27).view(2, 12), model.new_cache(2, 12))


@pytest.fixture
def bin_folder(tmp_path, monkeypatch) -> Path:
    """Return the only folder on PATH, and no CXX; an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def cleared(compile_small) -> Iterator[None]:
    """No library in this process, before and after the test."""
    native_cpu.library.cache_clear()
    yield
    native_cpu.library.cache_clear()


@pytest.fixture
def compile_small(tmp_path, monkeypatch) -> Callable[[], object]:
    (tmp_path / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(native_cpu, "SOURCE", tmp_path / "small.cpp")
    return native_cpu.library.__wrapped__


def script(file: Path, before: str = "") -> None:
    """Write a program that runs other lines of shell and then g++."""
    file.write_text(f'#!/bin/sh\nPATH={os.defpath}\n{before}\nexec {GCC} "$@"\n')
    file.chmod(0o755)


REFUSES_OPENMP = """case " $* " in *" -fopenmp "*)
    echo "clang++: error: unsupported option '-fopenmp'" >&2; exit 1;; esac"""


@pytest.mark.parametrize(
    "name",
    [
        "c++",
        "g++-15",
        "clang++-18",
        f"{MACHINE}-conda-linux-gnu-c++",
        f"{MACHINE}-linux-gnu-g++-12",
    ],
)
def test_a_compiler_is_known_by_the_form_of_its_name(name, bin_folder, compile_small):
    script(bin_folder / name)
    assert compile_small().uses_openmp()


@pytest.mark.parametrize("name", [f"{OTHER}-linux-gnu-g++", f"{MACHINE}-w64-mingw32-g++", "g++filt", "colorg++", "gcc"])
def test_a_compiler_for_another_machine_is_none(name, bin_folder, compile_small):
    script(bin_folder / name)
    with raises_option("C++"):
        compile_small()


def test_plain_names_come_first_then_the_newest_version(bin_folder):
    for name in ("clang++", "clang++-18", "g++-9", "g++-12", f"{MACHINE}-linux-gnu-g++", "c++"):
        script(bin_folder / name, f": {name}")
    (bin_folder / "g++").symlink_to("c++")  # the same program counts once
    names = [Path(words[0]).name for words in native_cpu._compilers()]
    assert names == ["c++", "clang++", "g++-12", "g++-9", "clang++-18", f"{MACHINE}-linux-gnu-g++"]


def test_the_compiler_of_cxx_may_have_a_wrapper_and_options(bin_folder, compile_small, monkeypatch):
    script(bin_folder / "c++", "exit 1")
    script(bin_folder / "my compiler")
    (bin_folder / "wrapper").write_text('#!/bin/sh\nexec "$@"\n')
    (bin_folder / "wrapper").chmod(0o755)
    monkeypatch.setenv("CXX", f"wrapper '{bin_folder}/my compiler' -DNOTHING=1")
    assert compile_small().uses_openmp()


@pytest.mark.parametrize("cxx", ["nosuch-c++ -O2", "g++ 'unbalanced", "/bin/true"])
def test_a_useless_cxx_is_named(cxx, bin_folder, compile_small, monkeypatch, capsys):
    monkeypatch.setenv("CXX", cxx)
    with raises_option("CXX"):
        compile_small()
    if "'" not in cxx:  # another compiler helps, and the note names the useless one
        script(bin_folder / "c++")
        assert compile_small().uses_openmp()
        assert f"CXX={cxx}" in capsys.readouterr().err


def test_a_compiler_that_hangs_is_left(bin_folder, compile_small, monkeypatch):
    monkeypatch.setattr(native_cpu, "TRIAL_SECONDS", 0.5)
    script(bin_folder / "c++", "exec sleep 60")
    with raises_option("c++", "0"):
        compile_small()


def test_a_library_that_cannot_be_loaded_is_no_library(bin_folder, compile_small):
    """A compiler for another processor writes such a library."""
    script(bin_folder / "c++", 'for built; do :; done; echo text > "$built"; exit 0')
    with raises_option("c++"):
        compile_small()
    script(bin_folder / "g++")
    assert compile_small().uses_openmp()


def test_without_openmp_the_engine_runs_on_one_thread(bin_folder, compile_small, capsys):
    script(bin_folder / "c++", REFUSES_OPENMP)
    assert not compile_small().uses_openmp()
    assert "-fopenmp" in capsys.readouterr().err
    script(bin_folder / "g++-12")  # Homebrew's, next to Apple's
    assert compile_small().uses_openmp()


CPU = torch.device("cpu")


def test_more_threads_than_one_are_refused_without_openmp(bin_folder, cleared, capsys):
    script(bin_folder / "c++", REFUSES_OPENMP)
    assert modes.resolve_mode("native", CPU, torch.float32, [], threads=1) == "native"
    assert modes.resolve_mode("auto", CPU, torch.float32, []) == "native"
    assert modes.resolve_mode("auto", CPU, torch.float32, [], threads=2) == "eager"
    assert "--threads 2" in capsys.readouterr().err
    with raises_option("--threads 2"):
        modes.resolve_mode("native", CPU, torch.float32, [], threads=2)


def test_int8_without_a_compiler_says_what_the_compiler_said(bin_folder, cleared):
    script(bin_folder / "c++", "echo this compiler has no licence >&2; exit 1")
    with raises_option("--int8", "no licence"):
        modes.resolve_mode("auto", CPU, torch.float32, [], int8=True)
    with raises_option("no licence"):
        modes.resolve_mode("native", CPU, torch.float32, [])
    assert modes.resolve_mode("auto", CPU, torch.float32, []) == "eager"


NOEXEC = """
mount -t tmpfs -o noexec none "$0" && export XDG_CACHE_HOME="$0" TMPDIR="$0" && exec "$@"
"""
RESOLVE = """
import sys, torch
from draftlab.errors import UserError
from draftlab.model import modes
for mode in ("auto", "native"):
    try:
        print(modes.resolve_mode(mode, torch.device("cpu"), torch.float32, []))
    except UserError as error:
        print("error", error)
"""


def test_where_nothing_can_be_executed_auto_is_eager(tmp_path):
    """The command runs in a mount namespace whose folders for caches and temporary files are noexec."""
    (tmp_path / "noexec").mkdir()
    alone = ["unshare", "-m", "sh", "-c", NOEXEC, tmp_path / "noexec"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"]).returncode:
        pytest.skip("no mount namespaces")
    done = subprocess.run([*alone, sys.executable, "-c", RESOLVE], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "eager"
    assert second.startswith("error ")
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "noexec") in done.stderr


def test_without_openmp_logits_are_the_same(tmp_path):
    """And torch runs on one thread, too, so that records tell the truth."""
    build("qwen3").save_pretrained(tmp_path / "model")
    script(tmp_path / "c++", REFUSES_OPENMP)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {"PATH": str(tmp_path), "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": ""}
    words = [sys.executable, "-c", LOGITS, tmp_path / "model", tmp_path / "without"]
    subprocess.run(words, env=os.environ | environment, check=True)
    found, threads = torch.load(tmp_path / "without")
    assert native_cpu.has_threads()
    assert torch.equal(found, logits(tmp_path / "model"))
    assert threads == 1
