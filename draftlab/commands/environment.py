"""The command env."""

from draftlab import provenance, workspace
from draftlab.commands.base import Outcome, command
from draftlab.config.make import EnvConfig


@command(EnvConfig)
def env(config: EnvConfig) -> Outcome:
    """Show versions, machine and workspace, to paste into a bug report."""
    import torch

    from draftlab.latency.machine_state import device_name, read_environment
    from draftlab.model import checkpoint

    space, machine = workspace.load(), read_environment()
    device = checkpoint.resolve_device(space.device)
    facts: dict[str, object] = {
        **provenance.versions(),
        "system": machine.system,
        "processor": f"{machine.processor}, {machine.cores} cores, {machine.busy_cores:.1f} busy with other work",
        "device": device_name(device),
        "driver": machine.driver or "none",
        "threads": torch.get_num_threads(),
        "workspace": str(workspace.FILE.absolute())
        if workspace.FILE.exists()
        else "none; the paper's models",
        "target": space.target,
        "source": space.source,
        "dtype": checkpoint.dtype_name(checkpoint.resolve_dtype(space.dtype, device)),
    }
    return Outcome(
        path=None, show=[f"{name}: {value}" for name, value in facts.items()], data=facts
    )
