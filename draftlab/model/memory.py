"""How much memory is free, and whether what is about to be loaded fits it."""

from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from draftlab.errors import UserError

CGROUPS = (  # limit, usage, statistics and what of them the kernel takes back: of version 2, of version 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what can still be allocated on a device; of the machine's memory no more than a container may have."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    free = psutil.virtual_memory().available
    for limit, usage, statistics, reclaimed in CGROUPS:
        try:
            most, used = ((cgroup / name).read_text().strip() for name in (limit, usage))
            counted = dict(line.split() for line in (cgroup / statistics).read_text().splitlines())
        except OSError:
            continue
        if most != "max":
            free = min(free, int(most) - int(used) + int(counted.get(reclaimed, 0)))
    return free


def check_fits(needs: Mapping[str, float], device: torch.device, advice: str) -> None:
    """Raises UserError: needs, bytes by what they are for, are more than is free."""
    free, total = free_bytes(device), sum(needs.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in needs.items() if size >= 5e6)
        raise UserError(f"not enough memory: {parts}, and {free / 1e9:.3g} GB are free on {device}; take {advice}")
