"""Accuracies on disk, and which model each of them is of. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from draftlab.console import note
from draftlab.errors import UserError
from draftlab.reading import FileModel, read_model
from draftlab.results.score import Model, Score, TaskResult

FILE = "accuracy.json"


class ModelAccuracy(FileModel):
    """Results of one model: all metrics of all tasks."""

    name: str
    sha256: str
    results: list[TaskResult]


class AccuracyConditions(FileModel):
    """Conditions of an evaluation. None: all items; the task's own number of examples."""

    limit: int | None
    num_fewshot: int | None
    apply_chat_template: bool
    data: str  # of the two code tasks
    dtype: str
    seed: int


class Accuracy(FileModel):
    """The accuracy of some models on the same tasks, accuracy.json."""

    version: Literal[1] = 1
    models: list[ModelAccuracy]
    conditions: AccuracyConditions
    items: dict[str, int]  # by the name that --tasks has
    command: str
    versions: dict[str, str]
    created: str


class Accuracies:
    """Accuracies of several outputs, to join to what else is known of the same models."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises UserError: a path is not an output of draftlab accuracy, or two of them differ on the same task."""
        self.paths = paths
        self.models = [model for path in paths for model in read_model(Accuracy, path, FILE, HINT).models]
        results = {(m.sha256, r.task, r.metric): r for m in self.models for r in m.results}
        for model in self.models:
            for r in model.results:
                if results[model.sha256, r.task, r.metric] != r:
                    raise UserError(f"--accuracy: two outputs differ in {r.task}, {r.metric} of {model.name}; name one")

    def of(self, name: str, sha256: str | None) -> list[TaskResult]:
        """Return the results of a model: of the same weights, or of the same name where its weights are not known."""
        same = [m for m in self.models if (m.sha256 == sha256 if sha256 else m.name == name)]
        return list({(r.task, r.metric): r for m in same for r in m.results}.values())

    def join(self, model: Model) -> Model:
        """Return a model with these results in addition."""
        return model.model_copy(update={"tasks": self.added(model.tasks, model.name, model.sha256)})

    def added(self, tasks: Sequence[TaskResult], name: str, sha256: str | None) -> list[TaskResult]:
        """Return what is known of a model and its results here; of the same task and metric, these."""
        return list({(r.task, r.metric): r for r in [*tasks, *self.of(name, sha256)]}.values())

    def check(self, drafts: Sequence[tuple[str, str | None]]) -> None:
        """Note drafts, by name and hash, that have no accuracy here. Raises UserError: none has."""
        without = [name for name, sha256 in drafts if not self.of(name, sha256)]
        if not self.models or not without:
            return
        known = ", ".join(model.name for model in self.models)
        if len(without) == len(drafts):
            raise UserError(f"--accuracy has {known}, and none with the name and weights of {', '.join(without)}")
        note(f"no accuracy of {', '.join(without)}; --accuracy has {known}")


HINT = "; name an output of draftlab accuracy"


def with_accuracy(scores: Sequence[Score], paths: Sequence[Path]) -> list[Score]:
    """Return the scores with the accuracies of their drafts and targets.

    Raises:
        UserError: none is of any of the drafts.
    """
    accuracies = Accuracies(paths)
    accuracies.check([(score.draft.name, score.draft.sha256) for score in scores])
    return [
        score.model_copy(update={"draft": accuracies.join(score.draft), "target": accuracies.join(score.target)})
        for score in scores
    ]
