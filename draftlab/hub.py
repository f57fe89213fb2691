"""Names of checkpoints to directories: embedded models, folders, the Hugging Face hub; which files count. No torch."""

import json
from pathlib import Path

from draftlab.errors import UserError, did_you_mean
from draftlab.layouts import other_layout

EMBEDDED = Path(__file__).parent / "models"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]  # configuration and tokenizer


def locate(name: str | Path, weights: bool = True) -> Path:
    """Return the directory of a checkpoint: an embedded name (``tiny``), a directory, or a hub name, which is fetched.

    A hub name is OWNER/NAME or OWNER/NAME@REVISION. Without weights its configuration and tokenizer alone are fetched.

    Raises:
        UserError: none of these; says what was tried.
    """
    path = Path(name)
    embedded = sorted(p.name for p in EMBEDDED.iterdir() if p.is_dir())
    if str(name) in embedded:
        return EMBEDDED / str(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            _refuse_other_layouts(path)
            raise UserError(f"{path} is not a checkpoint: it has no config.json")
        return path
    if path.is_file():
        _refuse_other_layouts(path)
        raise UserError(f"{path} is a file, and a checkpoint is a directory")
    if str(name).count("/") != 1 or path.is_absolute():
        raise UserError(f"no checkpoint at {name}{did_you_mean(str(name), [*embedded, *_siblings(path)])}")
    return _from_hub(str(name), weights)


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint's weights as transformers picks them: model.safetensors, or those of an index.

    Each with the tensors that the index takes from it, None for all.

    Raises:
        UserError: none there, or an index that is broken, names a tensor twice or a file that is missing or outside.
    """
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    if not (directory / INDEX).is_file():
        _refuse_other_layouts(directory)
        shards = sorted(p.name for p in directory.glob("*.safetensors"))
        why = f"; {shards[0]} needs its {INDEX}" if shards else ""
        raise UserError(f"{directory} holds no {SINGLE} and no {INDEX}{why}")
    index = read_index(directory / INDEX)
    files = {directory / name: {t for t, file in index.items() if file == name} for name in sorted(set(index.values()))}
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{directory}: {missing[0]} is missing, which {INDEX} names")
    return dict(files)


def read_index(file: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises UserError: see weight_files."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise UserError(f"{file}: two tensors are called {twice!r}")
        return dict(pairs)

    try:
        read = json.loads(file.read_text(), object_pairs_hook=once)
        index = {str(tensor): str(name) for tensor, name in read["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no index of tensors: {type(error).__name__} {error}") from None
    outside = [name for name in index.values() if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside or not index:
        raise UserError(f"{file} names {'a file outside its folder: ' + outside[0] if outside else 'no tensor'}")
    return index


def _refuse_other_layouts(path: Path) -> None:
    layout = other_layout(path)
    if layout is not None:
        raise UserError(f"{path} is {layout.advice()}")


def _siblings(path: Path) -> list[str]:
    parent = path.parent
    return [str(p) for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        place = Path(snapshot_download(repo, revision=revision or None, allow_patterns=PLAIN, ignore_patterns=["*/*"]))
        if weights and not (place / SINGLE).is_file():
            files = sorted(set(read_index(place / INDEX).values())) if (place / INDEX).is_file() else [SINGLE]
            place = Path(snapshot_download(repo, revision=revision or None, allow_patterns=files))
        return place
    except UserError:
        raise
    except Exception as error:  # offline, unknown, gated, no disk: the hub client has a class for each
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{name} is no directory here and could not be fetched from the hub ({type(error).__name__}: {reason}); "
            "for the embedded models run: draftlab init --preset tiny"
        ) from None
