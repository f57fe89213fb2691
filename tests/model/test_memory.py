"""What is free is the least of machine and container, and what does not fit is refused before it is loaded."""

from pathlib import Path

import psutil
import pytest
import torch
from helpers.errors import raises_option

from draftlab.model.cgroups import Cgroups
from draftlab.model.checkpoint import CPU
from draftlab.model.devices import check_fits, free_bytes


def group(place: Path, **files: object) -> None:
    """Make a directory of the cgroup file system. files: names with _ for the first dot."""
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("_", ".", 1)).write_text(f"{text}\n")


def of(root: Path, membership: str) -> Cgroups:
    (root / "own").write_text(membership)
    return Cgroups(root, root / "own")


MB = 1_000_000
OLD = "9:name=systemd:/\n4:memory:/slurm/job_1/step_0\n1:cpu,cpuacct:/slurm/job_1\n0::/\n"


def test_a_container_may_have_less_than_the_machine(tmp_path):
    """3 GB allowed and 2 used, of which the kernel takes 0.6 GB of read files back; its root is its own group."""
    stat = f"anon {1400 * MB}\ninactive_file {500 * MB}\nactive_file {100 * MB}"
    group(tmp_path, memory_max=3000 * MB, memory_current=2000 * MB, memory_stat=stat)
    for own in ("0::/\n", "0::/docker/0123\n", "0::/../../other\n"):
        assert free_bytes(CPU, of(tmp_path, own)) == 1600 * MB
    stat = f"inactive_file 7\ntotal_inactive_file {90 * MB}\ntotal_active_file {10 * MB}"
    old = {"memory_limit_in_bytes": 3000 * MB, "memory_usage_in_bytes": 2900 * MB}
    group(tmp_path / "v1/memory", **old, memory_stat=stat)
    assert free_bytes(CPU, of(tmp_path / "v1", "4:memory:/docker/0123\n")) == 200 * MB


@pytest.mark.parametrize("root", [".", "unified"])
def test_a_job_has_the_least_of_its_groups(root, tmp_path):
    """The root of version 2 has no limit. A soft limit (memory.high) slows the job down before the hard one ends it."""
    tree, own = tmp_path / root, of(tmp_path, "0::/slurm/job_1/step_0\n")
    group(tree / "slurm/job_1/step_0", memory_max="max", memory_current=5, memory_stat="anon 5")
    group(tree / "slurm/job_1", memory_max=900 * MB, memory_current=100 * MB, memory_stat="anon 5")
    group(tree / "slurm/job_2", memory_max=MB, memory_current=0, memory_stat="anon 0")
    assert free_bytes(CPU, own) == 800 * MB
    group(tree / "slurm/job_1", memory_high=600 * MB)
    assert free_bytes(CPU, own) == 500 * MB
    group(tree / "slurm", memory_max=800 * MB, memory_current=790 * MB, memory_stat="anon 5")
    assert free_bytes(CPU, own) == 10 * MB
    group(tree / "slurm", memory_current=900 * MB)
    assert free_bytes(CPU, own) == 0


def test_a_job_of_the_first_version_has_the_least_of_its_groups(tmp_path):
    none = 9223372036854771712  # the kernel's number for no limit
    for place, limit in (("", none), ("slurm", none), ("slurm/job_1", 700 * MB)):
        files = {"memory_limit_in_bytes": limit, "memory_usage_in_bytes": 100 * MB}
        group(tmp_path / "memory" / place, **files, memory_stat="total_inactive_file 0")
    assert free_bytes(CPU, of(tmp_path, OLD)) == 600 * MB


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path):
    group(tmp_path, memory_max="max", memory_current=5, memory_stat="anon 5")
    for own in (of(tmp_path, "0::/\n"), Cgroups(tmp_path, tmp_path / "none"), Cgroups()):
        assert free_bytes(CPU, own) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_quota_of_cpu_time_is_the_least_of_all_groups(tmp_path):
    group(tmp_path / "job/step", cpu_max="max 100000")
    own = of(tmp_path, "0::/job/step\n")
    assert own.cpus() is None
    group(tmp_path / "job", cpu_max="250000 100000")
    assert own.cpus() == 3
    group(tmp_path, cpu_max="50000 100000")
    assert own.cpus() == 1
    for place, quota in (("", -1), ("slurm", -1), ("slurm/job_1", 200000)):
        files = {"cpu_cfs_quota_us": quota, "cpu_cfs_period_us": 100000}
        group(tmp_path / "v1/cpu,cpuacct" / place, **files)
    assert of(tmp_path / "v1", OLD).cpus() == 2


def test_what_does_not_fit_is_named():
    check_fits({"weights of a": 1e6}, torch.device("cpu"), "less")
    with raises_option("weights of a"):
        check_fits({"weights of a": 9e12, "logits": 1e6}, torch.device("cpu"), "less")
