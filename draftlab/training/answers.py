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
from draftlab.model import checkpoint, hub
from draftlab.model.tokenizer import known_ids
from draftlab.output import Output
from draftlab.prompts import Prompts, file_prompts
from draftlab.sampling import SamplingParams
from draftlab.target_outputs import build
from draftlab.target_outputs.outputs import TEMPERATURES
from draftlab.target_outputs.store import MANIFEST, read_manifest
from draftlab.target_outputs.targets import LocalTarget
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
    building = _build_config(config, target)
    out = building.output_directory()
    with process_state().main_process_first():
        if (out / MANIFEST).exists() and read_manifest(out).finished:
            note(f"{out} has the target's answers already")
        else:
            note(f"the target's answers go to {out}; later runs, and --outputs, find them there")
            output = Output(command="outputs build", config=building, out=out)
            with output.locked(resumes=True):
                _write(config, target, output)
    return out


def prompts_to_answer(config: DistillConfig, target: Path) -> Prompts:
    """Return the prompts that the target answers. Raises UserError: see file_prompts."""
    assert config.prompt_file is not None
    tokenizer = checkpoint.load_tokenizer(target)
    return file_prompts(
        config.prompt_file, tokenizer, chat=config.chat, system_prompt=config.system_prompt,
        split="train" if config.prompt_file == Path(config.data) else None,
    )  # fmt: skip


def _write(config: DistillConfig, target: Path, output: Output) -> None:
    assert config.prompt_file is not None
    sampling = SamplingParams(
        temperature=config.sample_temperature, max_tokens=config.max_new_tokens, seed=config.seed,
        stop_token_ids=checkpoint.eos_token_ids(target),
    )  # fmt: skip
    prompts = prompts_to_answer(config, target)
    answers = build.Answers(prompts=prompts, use="distill", sampling=sampling, seed=config.seed)
    model = LocalTarget(
        target, checkpoint.resolve_device(config.device), None, config.device_map, config.memory, build.DISTILL_BATCH
    )
    build.build(model, answers, min(build.DISTILL_TOP_LOGPROBS, known_ids(target)), output, [config.prompt_file])


def _build_config(config: DistillConfig, target: Path) -> OutputsBuildConfig:
    """Return the settings of outputs build that write the answers, to a place of their own under the runs."""
    assert config.prompt_file is not None
    settings: dict[str, object] = {
        "target": config.target, "prompt_file": config.prompt_file, "chat": config.chat,
        "max_new_tokens": config.max_new_tokens, "temperature": config.sample_temperature, "seed": config.seed,
        "device": config.device, **({} if config.device_map is None else {"device_map": config.device_map}),
    }  # fmt: skip
    if config.prompt_file == Path(config.data):
        settings = {name: value for name, value in settings.items() if name != "prompt_file"}
        settings |= {"data": config.data, "text": "target"}
    places = ("target", "prompt_file", "data", "device", "device_map")
    decides = {name: str(value) for name, value in settings.items() if name not in places}
    decides |= {} if config.system_prompt is None else {"system_prompt": config.system_prompt}
    inputs = [provenance.fingerprint(target), provenance.file_sha256(config.prompt_file)]
    key = hashlib.sha256(json.dumps([decides, inputs]).encode()).hexdigest()[:8]
    name = f"answers-{hub.checkpoint_name(target)}-{config.prompt_file.stem}-{key}"
    return OutputsBuildConfig.build({**settings, "out": workspace.load().runs / name})
