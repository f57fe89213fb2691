"""Files that come with draftlab, which commands take by name: recipes, shapes, targets, devices, tasks of lm-eval."""

from pathlib import Path

from draftlab.errors import UserError, did_you_mean

FOLDERS = {  # kind -> folder in a clone; in a wheel it is draftlab/KIND (pyproject.toml)
    "recipes": "recipes",
    "tasks": "recipes/tasks",
    "widths": "configs/widths",
    "targets": "configs/targets",
    "profiles": "configs/profiles",
}
# the recipes and tasks that need no other file; a clone has more, which are named by path
RECIPES = ("quickstart", "llama-65b", "llama-65b-served", "llama-65b-replay")
TASKS = ("code_next_line", "code_bits_per_byte")


def folder(kind: str) -> Path:
    """Return the folder of a kind of files: in the installed package or in a clone of the repository.

    kind: A key of FOLDERS.
    """
    package = Path(__file__).parent
    installed = package / kind
    return installed if installed.is_dir() else package.parent / FOLDERS[kind]


def named(*kinds: str) -> dict[str, Path]:
    """Return the files of these kinds by name: the file's name without .yaml."""
    chosen = {"recipes": RECIPES, "tasks": TASKS}
    return {
        path.stem: path
        for kind in kinds
        for path in sorted(folder(kind).glob("*.yaml"))
        if path.stem in chosen.get(kind, (path.stem,))
    }


def locate(name: str | Path, *kinds: str) -> Path:
    """Return the path of the file of these kinds that has this name, or the path that `name` is.

    A name is looked up first, so that a file or directory of the same name in the current directory changes nothing.

    Raises:
        UserError: There is no such name and no such file.
    """
    known = named(*kinds)
    if str(name) in known:
        return known[str(name)]
    path = Path(name)
    if not path.is_file():
        called = path.stem if path.suffix in (".yaml", ".yml") else path.name  # names may have dots
        raise UserError(f"{name} is neither a file nor a name that draftlab knows{did_you_mean(called, known)}")
    return path
