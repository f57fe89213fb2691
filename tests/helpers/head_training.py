"""What every head that distill trains must do, and the settings of its short runs."""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from draftlab.commands import COMMANDS
from helpers.builders import training_killed_at


def head_settings(folder: Path, target: Path) -> dict[str, Any]:
    """Return the settings of a run of six steps on text that is written to a folder."""
    file = folder / "text.txt"
    file.write_text("\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 60 for i in range(40)))
    return {
        "target": str(target),
        "data": str(file),
        "steps": 6,
        "batch_size": 2,
        "lr": 2e-3,
        "seq_len": 32,
        "training_dtype": "float32",
        "eval_steps": 2,
        "save_steps": 2,
    }


def check_killed_run(trained: Path, settings: dict[str, Any], folder: Path) -> None:
    """Check that a killed run that is typed again writes the head of an undisturbed run, and nothing else."""
    out = folder / "head"
    with training_killed_at(4):
        COMMANDS["distill"](**settings, out=out)
    COMMANDS["distill"](**settings, out=out)
    assert [path.name for path in folder.iterdir()] == ["head"]
    found, wanted = (load_file(head / "model.safetensors") for head in (out, trained))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def distilled_from_store(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train folder/head on outputs of the target in folder/store, and return the command's data."""
    COMMANDS["outputs build"](
        target=settings["target"],
        data=settings["data"],
        use="replay",
        num_prompts=12,
        prompt_tokens=8,
        max_new_tokens=20,
        temperature=1.0,
        out=folder / "store",
    )
    given = {name: value for name, value in settings.items() if name != "data"}
    outcome = COMMANDS["distill"](**given, outputs=folder / "store", out=folder / "head")
    return cast(Any, outcome.data)
