"""The target's answers to a file of prompts, written once, and kept as stored outputs that later runs find."""

import hashlib
import json
from pathlib import Path

from draftlab import provenance, workspace
from draftlab.config.distill import DistillConfig
from draftlab.config.outputs import OutputsBuildConfig
from draftlab.console import note
from draftlab.data import is_chat_file
from draftlab.errors import UserError
from draftlab.model import hub
from draftlab.output import Output
from draftlab.prompts import Prompts
from draftlab.target_outputs import build
from draftlab.target_outputs.outputs import TEMPERATURES
from draftlab.target_outputs.store import MANIFEST, read_manifest
from draftlab.training.checkpointer import process_state


def with_prompts_of_data(config: DistillConfig) -> DistillConfig:
    """Return settings in which the target answers the conversations of the data, where it is asked to write.

    Their held-out lines are left out: `score` takes its prompts from those.

    Raises:
        UserError: a setting of answers where the data has no conversations.
    """
    if config.prompt_file is None and config.may_answer_data and is_chat_file(config.data):
        return config.model_copy(update={"prompt_file": Path(config.data)})
    if config.prompt_file is None and config.is_set("max_new_tokens"):
        raise UserError(f"--max-new-tokens: {config.data} has no conversations to answer; it needs --prompt-file")
    return config


def stored_answers(config: DistillConfig, target: Path) -> Path:
    """Return the store of what the target answers to config.prompt_file, which one process writes if it is missing.

    A killed run leaves what it has, and the next one goes on there.

    Raises:
        UserError: a loss temperature that stores do not hold; or see target_outputs.build.
    """
    if config.temperature not in TEMPERATURES:
        known = ", ".join(f"{value:g}" for value in TEMPERATURES)
        raise UserError(f"--temperature {config.temperature:g}: stored answers have {known}")
    building = build_config(config, target)
    out = building.output_directory()
    with process_state().main_process_first():
        if (out / MANIFEST).exists() and read_manifest(out).finished:
            note(f"{out} has the target's answers already")
        else:
            note(f"the target's answers go to {out}; later runs, and --outputs, find them there")
            output = Output(command="outputs build", config=building, out=out)
            with output.locked(resumes=True):
                build.build(building, output)
    return out


def prompts_to_answer(config: DistillConfig, target: Path) -> Prompts:
    """Return the prompts that the target answers. Raises UserError: see file_prompts."""
    building = build_config(config, target)
    return build.prompts_of(building, target)


def build_config(config: DistillConfig, target: Path) -> OutputsBuildConfig:
    """Return the settings of outputs build that write the answers, to a place of their own under the runs."""
    assert config.prompt_file is not None
    optional = {"system_prompt": config.system_prompt, "device_map": config.device_map}
    settings: dict[str, object] = {
        "target": config.target, "prompt_file": config.prompt_file, "chat": config.chat,
        "max_new_tokens": config.max_new_tokens, "temperature": config.sample_temperature, "seed": config.seed,
        "device": config.device, "memory": config.memory,
        **{name: value for name, value in optional.items() if value is not None},
    }  # fmt: skip
    if config.prompt_file == Path(config.data):
        settings["prompt_split"] = "train"
    places = ("target", "prompt_file", "memory", "device", "device_map")
    decides = {name: str(value) for name, value in settings.items() if name not in places}
    inputs = [provenance.fingerprint(target), provenance.file_sha256(config.prompt_file)]
    key = hashlib.sha256(json.dumps([decides, inputs]).encode()).hexdigest()[:8]
    name = f"answers-{hub.checkpoint_name(target)}-{config.prompt_file.stem}-{key}"
    return OutputsBuildConfig.build({**settings, "use": "distill", "out": workspace.load().runs / name})
