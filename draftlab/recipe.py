"""Recipes: files that list commands. All commands are checked first, then run from top to bottom."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab import shipped
from draftlab.commands.base import Command, Outcome
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


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """The steps of a recipe to run. plan_only: Whether to only find out which steps are done."""

    steps: list[CommandStep]
    plan_only: bool

    def run(self) -> Outcome:
        """Run the steps up to the first that misses a threshold, and return the outcome of the last step."""
        if self.plan_only:
            plan = {str(step): "done" if step.is_done() else "to do" for step in self.steps}
            show = [f"{name}: {state}" for name, state in plan.items()]
            return Outcome(path=None, show=show, data={"steps": plan})
        outcome = Outcome(path=None, show=[], data={})
        for number, step in enumerate(self.steps, 1):
            outcome = step.run(f"[{number}/{len(self.steps)}] {step}")
            if outcome.missed:
                break
        return outcome


def prepare(config: RunConfig, weights: bool) -> RecipeRun:
    return RecipeRun(read_recipe(config.recipe), config.plan_only)


def show(outcome: Outcome, config: RunConfig) -> Outcome:
    return outcome


RUN = Command(
    name="run",
    config=RunConfig,
    module="draftlab.recipe",
    help="Run a recipe; finished steps are skipped.",
    example="run quickstart",
)
