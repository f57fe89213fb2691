"""Recipes: files that list commands. All commands are checked first, then run from top to bottom."""

from pathlib import Path
from typing import Any

from draftlab import shipped
from draftlab.commands.base import Outcome, command
from draftlab.commands.steps import CommandStep, read_step
from draftlab.config.base import Config, option
from draftlab.reading import FileModel, read_yaml, reading


class RunConfig(Config):
    recipe: Path = option(
        help="Recipe: a YAML file with the key steps, a list of commands; or the name of a recipe that comes with "
        f"draftlab: {', '.join(shipped.RECIPES)}.",
        argument=True,
    )
    plan_only: bool = option(False, "Only show which steps are done.", flag="--dry-run")


class Recipe(FileModel):
    """The content of a recipe."""

    steps: list[dict[str, dict[str, Any] | None]]


def read_recipe(path: Path) -> list[CommandStep]:
    """Read a recipe, and check the settings of all steps before any step runs.

    path: File, or the name of a recipe that comes with draftlab.

    Raises:
        UserError: There is no such recipe, or a step or a setting is wrong. The message names both.
    """
    file = shipped.locate(path, "recipes")
    with reading(f"recipe {path}"):
        steps = Recipe.model_validate(read_yaml(file, f"recipe {path}")).steps
    return [read_step(step, f"{path}: step {number}") for number, step in enumerate(steps, 1)]


@command(RunConfig, example="run quickstart")
def run(config: RunConfig) -> Outcome:
    """Run a recipe; finished steps are skipped."""
    steps = read_recipe(config.recipe)
    if config.plan_only:
        plan = {str(step): "done" if step.is_done() else "to do" for step in steps}
        return Outcome(
            path=None,
            show=[f"{name}: {state}" for name, state in plan.items()],
            data={"steps": plan},
        )
    outcome = Outcome(path=None, show=[], data={})
    for number, step in enumerate(steps, 1):
        outcome = step.run(f"[{number}/{len(steps)}] {step}")
        if outcome.missed:
            break
    return outcome
