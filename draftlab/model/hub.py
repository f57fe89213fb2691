"""Names of checkpoints to directories: embedded models, folders, the Hugging Face hub; which files count. No torch."""

import functools
import json
import shlex
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

from draftlab.errors import UserError, did_you_mean
from draftlab.model.layouts import other_layout

EMBEDDED = Path(__file__).parents[1] / "embedded"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]  # configuration and tokenizer
PATIENCE = 3  # seconds


def locate(name: str | Path, weights: bool = True) -> Path:
    """Return the directory of a checkpoint: an embedded name (``tiny``), a directory, or a hub name, which is fetched.

    A hub name is OWNER/NAME or OWNER/NAME@REVISION. Without weights its configuration and tokenizer alone are fetched.

    Raises:
        UserError: none of these, with what was tried; weights that are not there or lie there in another layout.
    """
    path = Path(name)
    embedded = sorted(p.name for p in EMBEDDED.iterdir() if p.is_dir())
    if str(name) in embedded:
        return EMBEDDED / str(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            _refuse_other_layouts(path)
            raise UserError(f"{path} is not a checkpoint: it has no config.json")
        if weights:
            weight_files(path)
        return path
    if path.is_file():
        _refuse_other_layouts(path)
        raise UserError(f"{path} is a file, and a checkpoint is a directory")
    if str(name).count("/") != 1 or path.is_absolute():
        raise UserError(f"no checkpoint at {name}{did_you_mean(str(name), [*embedded, *_siblings(path)])}")
    return _from_hub(str(name), weights)


def import_source(name: str) -> Path:
    """Return what draftlab import reads: a path, or a hub name, of which .bin files and adapters are fetched.

    Raises:
        UserError: a hub name that cannot be had.
    """
    if Path(name).exists() or name.count("/") != 1 or Path(name).is_absolute():
        return Path(name)
    repo, _, revision = name.partition("@")
    return _fetch(repo, revision, [*PLAIN, "pytorch_model*.bin", "adapter_model.*"], ["*/*"])


def checkpoint_name(directory: Path) -> str:
    """Return what a checkpoint's directory is called, which in the hub's cache is not the name of the directory."""
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.rpartition("--")[2]
    return directory.absolute().name


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


def check_data(mixture: str) -> str:
    """Return the mixture. Raises UserError: part of it is on the hub, which cannot be reached."""
    on_hub = [part.strip().partition("=")[0] for part in mixture.split(",") if part.strip().startswith("hf:")]
    why = unreachable() if on_hub else None
    if why:
        raise UserError(
            f"data {on_hub[0]!r} is on the hub, which cannot be reached ({why}); "
            "name text that is here: --data FILE, a folder, or stdlib"
        )
    return mixture


def unreachable() -> str | None:
    """Return why the hub cannot be reached; None where it answers. Found out once for each endpoint."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _silence(constants.ENDPOINT)


@functools.cache
def _silence(endpoint: str) -> str | None:
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            outcome.append(None)  # an answer
        except OSError as error:
            why = getattr(error, "reason", error)
            outcome.append(
                None if isinstance(why, ssl.SSLError) else str(why)
            )  # the client may know other certificates
        else:
            outcome.append(None)

    asking = threading.Thread(target=ask, daemon=True)  # looking a name up knows no time limit
    asking.start()
    asking.join(PATIENCE)
    return outcome[0] if outcome else f"no answer from {endpoint} in {PATIENCE} s"


def _refuse_other_layouts(path: Path) -> None:
    layout = other_layout(path)
    if layout is not None:
        raise UserError(f"{path} is {layout.advice()}")


def _siblings(path: Path) -> list[str]:
    parent = path.parent
    return [str(p) for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []


def _from_hub(name: str, weights: bool) -> Path:
    repo, _, revision = name.partition("@")
    place = _fetch(repo, revision, PLAIN, ["*/*"])
    if not (place / "config.json").is_file():
        raise UserError(f"{name} is no checkpoint: it has no config.json{_other_layout_there(repo, place)}")
    if not weights or (place / SINGLE).is_file():
        return place
    files = sorted(set(read_index(place / INDEX).values())) if (place / INDEX).is_file() else [SINGLE]
    place = _fetch(repo, revision, files)
    if not all((place / file).is_file() for file in files):
        raise UserError(f"{name} has no {files[0]}{_other_layout_there(repo, place)}")
    return place


def _fetch(repo: str, revision: str, patterns: list[str], ignored: list[str] | None = None) -> Path:
    """Return the directory of a hub repository with the files of these patterns in it.

    Raises:
        UserError: they are neither in the hub's cache here nor to be had.
    """
    from huggingface_hub import constants, errors, snapshot_download

    name, why = f"{repo}@{revision}" if revision else repo, unreachable()
    try:
        place = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=ignored,
            local_files_only=bool(why),
        )
        return Path(place)
    except errors.GatedRepoError:
        reason = f"its owner gives it to whom asks: do so at {constants.ENDPOINT}/{repo}, then type: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such name, or it is private (then type: hf auth login)"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except errors.LocalEntryNotFoundError as error:
        why = why or " ".join(str(error.__cause__ or error).split())[:160]
        reason = (
            f"the hub cannot be reached ({why}), and not all of it was fetched before; name a directory, "
            "or begin with: draftlab init --preset tiny"
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    raise UserError(f"{name} is no directory here and could not be fetched: {reason}")


def _other_layout_there(repo: str, place: Path) -> str:
    """Return how to import what a hub repository holds instead, as the end of a message; '' where that is nothing."""
    from huggingface_hub import HfApi

    files = [] if unreachable() else HfApi().list_repo_files(repo, revision=place.name)
    kinds = [".gguf", "adapter_config.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    other = next((file for kind in kinds for file in files if file.endswith(kind)), None)
    if other is None:
        return ""
    folder = repo.split("/")[1]
    given = f"{folder}/{other}" if other.endswith(".gguf") else folder
    fetch = shlex.join(["hf", "download", repo, *([other] if given != folder else []), "--local-dir", folder])
    return f", but {other}; type: {fetch} && {shlex.join(['draftlab', 'import', given, '--out', f'{folder}-imported'])}"
