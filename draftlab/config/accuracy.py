"""Settings of accuracy, and those of lm-eval's tasks that score has as well."""

from pathlib import Path

from pydantic import BaseModel, field_validator

from draftlab.config import inputs, shared
from draftlab.config.base import Only, OutputConfig, option

TASKS = "Tasks"  # panel of --help
CODE_TASKS = "code_next_line,code_bits_per_byte"


class TaskSettings(BaseModel):
    """Settings of lm-eval's prompts, with its names."""

    num_fewshot: int | None = option(
        None, "Examples before each item. Default: the task's own number.", ge=0, panel=TASKS
    )
    apply_chat_template: bool = option(
        False, "Ask in the form of the tokenizer's chat template; examples become turns.", panel=TASKS
    )
    include_path: Path | None = option(None, "Folder with YAML files of more tasks.", panel=TASKS, advanced=True)


def accuracy_of(help: str) -> list[Path]:
    """Return the option that names outputs of draftlab accuracy."""
    return option(factory=list, help=f"Output of draftlab accuracy {help}; repeat for several.")


class AccuracyConfig(OutputConfig, TaskSettings, shared.CheckpointSettings):
    """Models, and the tasks to measure their accuracy on."""

    models: list[str] = option(
        help="Checkpoints: directories, or hub names with @REVISION.", argument=True, reads=inputs.checkpoint
    )
    tasks: str = option(
        help=f"lm-eval tasks or YAML files of tasks, separated by commas; {CODE_TASKS} need no download.", panel=TASKS
    )
    limit: int | None = option(None, "Only the first items of each task.", ge=1, panel=TASKS)
    batch_size: int | None = option(
        None, "Most texts per pass. Default: as many as memory allows.", ge=1, panel=TASKS, advanced=True
    )
    data: str = shared.data("Source of held-out text for the two code tasks.")
    dtype: shared.WeightsDtype = shared.dtype()
    device: shared.Device = shared.device()
    threads: int | None = shared.threads()
    seed: int = shared.seed()

    only = (
        Only(("data",), lambda c: set(c.task_names) & set(CODE_TASKS.split(",")), f"only {CODE_TASKS} read it"),
    )  # fmt: skip

    @field_validator("tasks")
    @classmethod
    def _names_tasks(cls, tasks: str) -> str:
        names = tasks.split(",")
        if not all(names) or len(set(names)) < len(names):
            raise ValueError("want different names of tasks, separated by commas without spaces")
        return tasks

    @property
    def task_names(self) -> list[str]:
        return self.tasks.split(",")

    def default_name(self) -> str:
        return "-".join(["accuracy", *(Path(name.partition("@")[0]).name for name in self.models)])
