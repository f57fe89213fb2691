"""The cost of a draft is the commands that made it from its source, not those that trained source and target."""

from pathlib import Path

from draftlab.runs.provenance import lineage, write_record


def checkpoint(folder: Path, command: str, seconds: float, *inputs: Path, **config: object) -> Path:
    """Write the record and the configuration of a checkpoint, as commands leave them."""
    output(folder, command, seconds, *inputs, **config)
    (folder / "config.json").write_text("{}")
    return folder


def output(folder: Path, command: str, seconds: float, *inputs: Path, **config: object) -> Path:
    folder.mkdir()
    read = {str(path): "" for path in inputs}
    write_record(folder, command, config, read, 0.0, seconds=seconds, total_seconds=seconds)
    return folder


def costs(draft: Path, target: Path, *, own: bool) -> dict[str, str]:
    return {path.name: stage.command for path, stage in lineage(draft, target, own=own).items()}


def test_own_cost_begins_at_the_source(tmp_path):
    source = checkpoint(tmp_path / "source", "train", 5227.75)
    target = checkpoint(tmp_path / "target", "distill", 99.0)
    answers = output(tmp_path / "answers", "outputs build", 60.0, target)
    pruned = checkpoint(tmp_path / "pruned", "prune", 30.0, source, answers, source=str(source))
    first = checkpoint(tmp_path / "first", "distill", 40.0, pruned, target, draft=str(pruned), target=str(target))
    second = checkpoint(tmp_path / "second", "distill", 50.0, first, answers, draft=str(first))
    made = costs(second, tmp_path / "served", own=True)
    assert made == {
        "answers": "outputs build",
        "pruned": "prune",
        "first": "distill",
        "second": "distill",
    }
    # training data of the source are looked for as well
    assert costs(second, tmp_path / "served", own=False).keys() == made.keys() | {
        "source",
        "target",
    }


def test_a_checkpoint_that_was_no_draft_is_a_source_of_distill(tmp_path):
    sibling = checkpoint(tmp_path / "sibling", "train", 5227.75)
    tuned = checkpoint(tmp_path / "tuned", "distill", 40.0, sibling, draft=str(sibling))
    assert costs(tuned, tmp_path / "served", own=True) == {"tuned": "distill"}


def test_a_head_costs_its_training_and_its_targets_answers(tmp_path):
    target = checkpoint(tmp_path / "target", "train", 5227.75)
    answers = output(tmp_path / "answers", "outputs build", 60.0, target)
    head = checkpoint(tmp_path / "head", "distill", 40.0, target, answers, target=str(target))
    assert costs(head, tmp_path / "a copy", own=True).keys() == {"answers", "head"}
