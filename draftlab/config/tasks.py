"""Settings of lm-eval's tasks, and the check of their names. No lm-eval."""

import difflib
import importlib.util
import re
from pathlib import Path

from pydantic import BaseModel

from draftlab.config.base import Only, option
from draftlab.errors import UserError

TASKS = "Tasks"  # panel of --help
NAME = re.compile(
    r"""^[ \t]*(?:(?:-[ \t]+)?["']?(?:task|group|tag)["']?:[ \t]*\[?|-[ \t]+)["']?([^\s"',#\]]+)""", re.MULTILINE
)


class TaskSettings(BaseModel):
    """Tasks of lm-eval, with its names of settings."""

    tasks: str | None = option(
        None, "lm-eval tasks or YAML files of tasks to measure accuracy on, separated by commas.", panel=TASKS
    )
    task_limit: int = option(200, "First items of each task.", ge=1, panel=TASKS, advanced=True)
    task_batch_size: int = option(1, "Texts of a task per pass.", ge=1, panel=TASKS, advanced=True)
    num_fewshot: int | None = option(
        None, "Examples before each item. Default: the task's own number.", ge=0, panel=TASKS, advanced=True
    )
    apply_chat_template: bool = option(
        False, "Ask in the form of the tokenizer's chat template; examples become turns.", panel=TASKS, advanced=True
    )
    include_path: Path | None = option(None, "Folder with YAML files of more tasks.", panel=TASKS, advanced=True)

    @property
    def task_names(self) -> list[str]:
        return self.tasks.split(",") if self.tasks else []


TASKS_ONLY = Only(
    ("task_limit", "task_batch_size", "num_fewshot", "apply_chat_template", "include_path"),
    lambda c: c.tasks,
    "needs --tasks",
)


def check_tasks(settings: TaskSettings) -> None:
    """Check the names of tasks against the text of the YAML files, which lm-eval takes seven seconds to parse.

    Raises:
        UserError: a name is neither a file nor a task, group or tag of lm-eval or of the folder.
    """
    folder = settings.include_path
    if folder is not None and not folder.is_dir():
        raise UserError(f"--include-path {folder}: no such directory")
    names = [name for name in settings.task_names if not Path(name).is_file()]
    package = importlib.util.find_spec("lm_eval")
    if not names or package is None:
        return
    known = {name for place in package.submodule_search_locations or [] for name in _names(Path(place) / "tasks")}
    known |= _names(folder) if folder is not None else set()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists the tasks"
            raise UserError(f"--tasks {name}: neither a task of lm-eval nor a YAML file; {hint}")


def _names(folder: Path) -> set[str]:
    """Return the names of tasks, groups and tags in a folder, and the other items of its lists."""
    files = (file for file in folder.rglob("*") if file.suffix in ("", ".yaml") and file.is_file())
    return {name for file in files for name in NAME.findall(file.read_text(errors="replace"))}
