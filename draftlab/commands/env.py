"""The command env, which shows what a bug report needs."""

from dataclasses import dataclass

import torch

from draftlab.commands.base import Outcome
from draftlab.commands.settings.make import EnvConfig
from draftlab.errors import UserError
from draftlab.latency.machine_state import device_name, read_environment
from draftlab.model import devices, precision
from draftlab.runs import provenance, workspace


@dataclass(frozen=True, slots=True)
class Description:
    """The description of versions, the machine and the workspace."""

    def run(self) -> dict[str, object]:
        """Return the facts by name."""
        space = workspace.load()
        machine = read_environment()
        device = devices.resolve_device(space.device)
        facts: dict[str, object] = {
            **provenance.versions(),
            "system": machine.system,
            "processor": f"{machine.processor}, {machine.cores} cores, {machine.busy_cores:.1f} busy with other work",
            "device": device_name(device),
            "driver": machine.driver or "none",
            "threads": torch.get_num_threads(),
            "workspace": str(workspace.FILE.absolute())
            if workspace.FILE.exists()
            else f"none; {workspace.FILE} is not in this folder",
            "target": space.target or "none",
            "source": space.source or "none",
            "dtype": space.dtype,
        }
        for mode in precision.DTYPES if device.type == "cpu" else ():
            try:
                facts[f"speed over float32 in mode {mode}"] = precision.speeds(mode).describe()
            except UserError as error:
                facts[f"mode {mode}"] = str(error)
        return facts


def prepare(config: EnvConfig, weights: bool) -> Description:
    return Description()


def show(facts: dict[str, object], config: EnvConfig) -> Outcome:
    return Outcome(path=None, show=[f"{name}: {value}" for name, value in facts.items()], data=facts)
