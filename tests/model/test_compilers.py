"""Mode native is compiled by any compiler of this machine, and where it cannot be, the reason is said."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import build
from errors import raises_option

from draftlab.model import native_cpu

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
from draftlab.model import llama, modes, native_cpu
modes.set_threads("native", None)
model = native_cpu.NativeLlama(llama.load(Path(sys.argv[1]), torch.float32))
ids = torch.arange(3, 27).view(2, 12)
torch.save([model.forward(ids, model.new_cache(2, 12)), torch.get_num_threads()], sys.argv[2])
"""


@pytest.fixture
def bin_folder(tmp_path, monkeypatch) -> Path:
    """The only folder on PATH, and no CXX; an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compile_small(tmp_path, monkeypatch) -> Callable[[], object]:
    (tmp_path / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(native_cpu, "SOURCE", tmp_path / "small.cpp")
    return native_cpu.library.__wrapped__


def script(file: Path, before: str = "") -> None:
    """A program that runs g++, after other lines of shell."""
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


@pytest.mark.parametrize(
    "name", [f"{OTHER}-linux-gnu-g++", f"{MACHINE}-w64-mingw32-g++", "g++filt", "colorg++", "gcc"]
)
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
    monkeypatch.setattr(native_cpu, "TRIAL_SECONDS", 60)
    script(bin_folder / "g++")
    assert compile_small().uses_openmp()


def test_a_library_that_cannot_be_loaded_is_no_library(bin_folder, compile_small):
    """As that of a compiler for another processor."""
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


def test_without_openmp_logits_are_the_same(bin_folder, tmp_path):
    """And torch runs on one thread, too, so that records tell the truth."""
    build("qwen3").save_pretrained(tmp_path / "model")
    found = {}
    for name, before in (("with", ""), ("without", REFUSES_OPENMP)):
        script(bin_folder / "c++", before)
        words = [sys.executable, "-c", LOGITS, tmp_path / "model", tmp_path / name]
        subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "2"}, check=True)
        found[name] = torch.load(tmp_path / name)
    assert torch.equal(found["with"][0], found["without"][0])
    assert [found["with"][1], found["without"][1]] == [2, 1]
