"""What is free is the least of machine and container, and what does not fit is refused before it is loaded."""

import psutil
import pytest
import torch
from errors import raises_option

from draftlab.model.checkpoint import CPU
from draftlab.model.devices import check_fits, free_bytes


def test_a_container_may_have_less_than_the_machine(tmp_path):
    """3 GB allowed and 2 used, of which the kernel takes half a GB of read files back; by version 2, then 1."""
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("2000000000\n")
    (tmp_path / "memory.stat").write_text("anon 1500000000\ninactive_file 500000000\n")
    assert free_bytes(CPU, tmp_path) == 1_500_000_000
    old = tmp_path / "v1" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("3000000000\n")
    (old / "memory.usage_in_bytes").write_text("2900000000\n")
    (old / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100000000\n")
    assert free_bytes(CPU, tmp_path / "v1") == 200_000_000


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    for name in ("memory.current", "memory.stat"):
        (tmp_path / name).write_text("5 5\n" if name.endswith("stat") else "5\n")
    assert free_bytes(CPU, tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_what_does_not_fit_is_named():
    check_fits({"weights of a": 1e6}, torch.device("cpu"), "less")
    with raises_option("weights of a"):
        check_fits({"weights of a": 9e12, "logits": 1e6}, torch.device("cpu"), "less")
