"""Training text from a file of prompts: the target answers them once, and later runs read the stored answers."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from draftlab.config.outputs import OutputsBuildConfig
from draftlab.config.shared import ChatMode
from draftlab.console import note
from draftlab.data.prompts import Prompts, file_prompts
from draftlab.dates import fixed_date
from draftlab.errors import UserError
from draftlab.model import checkpoint, hub
from draftlab.model.tokenizer import known_ids
from draftlab.output import Output
from draftlab.runs import provenance, workspace
from draftlab.sampling import SamplingParams
from draftlab.target_outputs import build
from draftlab.target_outputs.outputs import TEMPERATURES
from draftlab.target_outputs.store import MANIFEST, read_manifest, resume_date_of
from draftlab.target_outputs.targets import LocalTarget
from draftlab.training.checkpointer import process_state
from draftlab.training.loop import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """A file of prompts that the target answers, so that a student can learn from the answers.

    Attributes:
        name: Value of the option --target.
        target: Checkpoint of the target.
        of_data: Whether the file comes from --data. If so, the target answers only its training split, because
            `draftlab score` takes prompts from the held-out split.
    """

    name: str
    target: Path
    file: Path
    of_data: bool
    chat: ChatMode
    system_prompt: str | None
    max_new_tokens: int
    temperature: float
    seed: int
    hardware: Hardware

    def check(self, loss_temperature: float) -> None:
        """Check that stored answers can be used with a loss at this temperature.

        Raises:
            UserError: Target outputs are not stored for this temperature.
        """
        if loss_temperature not in TEMPERATURES:
            known = ", ".join(f"{value:g}" for value in TEMPERATURES)
            raise UserError(
                f"--temperature {loss_temperature:g}: stored answers have probabilities only for the temperatures "
                f"{known}; use --temperature 1"
            )

    def prompts(self) -> Prompts:
        """Return the prompts that the target answers. Raises UserError: the file cannot be used (see file_prompts)."""
        return file_prompts(
            self.file,
            checkpoint.load_tokenizer(self.target),
            chat=self.chat,
            system_prompt=self.system_prompt,
            split="train" if self.of_data else None,
        )

    def describe(self) -> str:
        """Return a phrase that names the prompts, for a dry run. Raises UserError: the file cannot be used."""
        return f"the target's answers to {len(self.prompts().rows)} prompts of {self.file}"

    def store(self) -> Path:
        """Return the directory of the stored answers. If an earlier run did not store them, the target writes them now.

        Only the main process lets the target write. The other processes wait.

        Raises:
            UserError: The answers cannot be written (see target_outputs.build).
        """
        settings = self._settings()
        out = settings.out
        assert out is not None
        with process_state().main_process_first():
            if (out / MANIFEST).exists() and read_manifest(out).finished:
                note(f"reading the target's answers from {out}, where an earlier run stored them")
            else:
                note(f"storing the target's answers in {out}; later runs with the same prompts read the answers there")
                output = Output(command="outputs build", config=settings, out=out)
                with output.locked(resumes=True), fixed_date():
                    resume_date_of(out)
                    self._write(output)
        return out

    def _write(self, output: Output) -> None:
        sampling = SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_new_tokens,
            seed=self.seed,
            stop_token_ids=checkpoint.eos_token_ids(self.target),
        )
        answers = build.TargetAnswers(prompts=self.prompts(), use="distill", sampling=sampling, seed=self.seed)
        device = self.hardware.resolved
        hardware = self.hardware
        model = LocalTarget(
            self.target,
            device,
            None,
            hardware.device_map,
            hardware.memory,
            build.batch_size("distill", device),
        )
        build.build(model, answers, min(build.DISTILL_TOP_LOGPROBS, known_ids(self.target)), output)

    def _settings(self) -> OutputsBuildConfig:
        """Return the settings with which `draftlab outputs build` stores the answers.

        The name of the output directory contains a hash of the prompts, the target and the sampling settings.
        """
        text = {"data": str(self.file), "text": "target"} if self.of_data else {"prompt_file": self.file}
        names = ("chat", "max_new_tokens", "temperature", "seed")
        sampled = {name: getattr(self, name) for name in names}
        decides = sampled | {"of_data": self.of_data, "system_prompt": self.system_prompt}
        inputs = [provenance.fingerprint(self.target), provenance.file_sha256(self.file)]
        key = hashlib.sha256(json.dumps([decides, inputs]).encode()).hexdigest()[:8]
        name = f"answers-{hub.checkpoint_name(self.target)}-{self.file.stem}-{key}"
        given = {
            "target": self.name,
            "device": self.hardware.device,
            "out": workspace.load().runs / name,
        }
        given |= {"device_map": self.hardware.device_map} if self.hardware.device_map else {}
        return OutputsBuildConfig.build(given | sampled | text)
