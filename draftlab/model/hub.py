"""Checkpoints by name: embedded models, directories, the Hugging Face hub; and their weight files. No torch."""

import functools
import shlex
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from draftlab.errors import UserError, did_you_mean, one_line
from draftlab.model.hf_files import check_causal
from draftlab.model.layouts import NOUNS, Layout, other_layout
from draftlab.reading import read_object, validation_text

EMBEDDED = Path(__file__).parents[1] / "embedded"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]  # configuration and tokenizer
TIMEOUT_SECONDS = 3
BUILT_IN_TEXT = ("stdlib", "stdlib-tests", "packages")
TEXT_SUFFIXES = (".jsonl", ".md", ".py", ".txt")


def locate(name: str | Path, weights: bool = True) -> Path:
    """Return the directory of a checkpoint: an embedded name (``tiny``), a directory, or a hub name, downloaded.

    A hub name is OWNER/NAME or OWNER/NAME@REVISION. weights=False downloads configuration and tokenizer only.

    Raises:
        UserError: there is no such checkpoint, or its weights are missing or in another layout.
    """
    path = Path(name)
    embedded = sorted(p.name for p in EMBEDDED.iterdir() if p.is_dir())
    if str(name) in embedded:
        return EMBEDDED / str(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            _refuse_other_layouts(path)
            raise UserError(f"{path} is not a checkpoint: it has no config.json")
        check_causal(path)
        if weights:
            weight_files(path)
        return path
    if path.is_file():
        _refuse_other_layouts(path)
        raise UserError(f"{path} is a file, and a checkpoint is a directory")
    if str(name).count("/") != 1 or path.is_absolute():
        raise UserError(f"no checkpoint at {name}{did_you_mean(str(name), [*embedded, *_siblings(path)])}")
    return _from_hub(str(name), weights)


def local(name: str | Path, weights: bool = False) -> Path | None:
    """Return the directory of a checkpoint on this disk, None for a name of the hub, which is looked up later.

    A name may end in @TYPE, of rounded weights. weights: their files must be here, too.

    Raises:
        UserError: see locate.
    """
    place = str(name) if Path(name).exists() else str(name).rpartition("@")[0] or str(name)
    on_hub = not Path(place).exists() and place.count("/") == 1 and not Path(place).is_absolute()
    return None if on_hub else locate(place, weights)


def import_source(name: str) -> Layout:
    """Return what to import: of the given path, or of a hub repository's .bin files or adapter, downloaded.

    Raises:
        UserError: there is no such path or nothing to import, or the repository cannot be downloaded.
    """
    path = Path(name)
    if not path.exists() and name.count("/") == 1 and not path.is_absolute():
        repo, _, revision = name.partition("@")
        path = _fetch(repo, revision, [*PLAIN, "pytorch_model*.bin", "adapter_model.*"], ["*/*"])
    layout = other_layout(path) if path.exists() else None
    if layout is None:
        raise UserError(f"{path} is not {', '.join(NOUNS.values())}")
    return layout


def checkpoint_name(directory: Path) -> str:
    """Return the name of a checkpoint; in the hub's cache it is not that of the directory."""
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.rpartition("--")[2]
    return directory.absolute().name


def is_eagle_head(name: str | Path) -> bool:
    """Return whether a directory has the config.json of an EAGLE-3 head, sound or not."""
    try:
        content = read_object(Path(name) / "config.json")
    except UserError:
        return False
    return "draft_vocab_size" in content or "speculators_model_type" in content


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint's weights as transformers picks them: model.safetensors, or those of an index.

    The value is the names of the tensors that the index takes from a file, or None for all.

    Raises:
        UserError: no weights, or an index that is broken, names a tensor twice or a file that is missing or outside.
    """
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    if not (directory / INDEX).is_file():
        _refuse_other_layouts(directory)
        shards = sorted(p.name for p in directory.glob("*.safetensors"))
        hint = f"; {shards[0]} needs its {INDEX}" if shards else ""
        raise UserError(f"{directory} has no {SINGLE} and no {INDEX}{hint}")
    index = read_index(directory / INDEX)
    files = {directory / name: {t for t, file in index.items() if file == name} for name in sorted(set(index.values()))}
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{directory}: {missing[0]}, named in {INDEX}, is missing")
    return dict(files)


def read_index(file: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises UserError: see weight_files."""
    try:
        index = TypeAdapter(dict[str, str]).validate_python(read_object(file).get("weight_map"), strict=True)
    except ValidationError as error:
        raise UserError(f"{file} is not an index of tensors: weight_map: {validation_text(error)}") from None
    if strange := next((name for name in index.values() if not name.isprintable() or not 0 < len(name) < 256), None):
        raise UserError(f"{file} names {one_line(strange, 80)!r}, which is no file name")
    outside = [name for name in index.values() if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside or not index:
        raise UserError(f"{file} names {'a file outside its directory: ' + outside[0] if outside else 'no tensor'}")
    return index


def check_data(mixture: str) -> str:
    """Return the mixture.

    Raises:
        UserError: part of it is nothing that can be read here, or on the hub, which cannot be reached.
    """
    on_hub = check_local_data(mixture)
    reason = offline_reason() if on_hub else None
    if reason:
        raise UserError(
            f"data {on_hub[0]!r} is on the hub, which cannot be reached ({reason}); "
            "name local text: --data FILE, a folder, or stdlib"
        )
    return mixture


def check_local_data(mixture: str) -> list[str]:
    """Return the parts of a mixture that are on the hub. Raises UserError: another one cannot be read here."""
    names = [part.strip().partition("=")[0] for part in mixture.split(",")]
    for name in names:
        if name not in (*BUILT_IN_TEXT, "") and not name.startswith("hf:"):
            check_local_text(name)
    return [name for name in names if name.startswith("hf:")]


def check_local_text(source: str) -> None:
    """Raises UserError: no such file or folder, or one that is not text."""
    path = Path(source)
    if not path.exists():
        hint = did_you_mean(source, BUILT_IN_TEXT)
        raise UserError(f"data {source!r}: neither a built-in source nor a file or folder{hint}")
    if path.is_file() and path.suffix not in TEXT_SUFFIXES:
        suffix = path.suffix or "a file without suffix"
        raise UserError(f"data {source!r}: cannot read {suffix}; want {', '.join(TEXT_SUFFIXES)}")


def offline_reason() -> str | None:
    """Return why the hub cannot be reached, or None if it can; each endpoint is tried once."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _connection_error(constants.ENDPOINT)


@functools.cache
def _connection_error(endpoint: str) -> str | None:
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError:
            outcome.append(None)  # an answer all the same
        except OSError as error:
            reason = getattr(error, "reason", error)
            outcome.append(None if isinstance(reason, ssl.SSLError) else str(reason))  # the client has its own CAs
        else:
            outcome.append(None)

    thread = threading.Thread(target=connect, daemon=True)  # a name look-up has no time limit of its own
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return outcome[0] if outcome else f"no answer from {endpoint} in {TIMEOUT_SECONDS} s"


def _refuse_other_layouts(path: Path) -> None:
    layout = other_layout(path)
    if layout is not None:
        raise UserError(f"{path} is {layout.advice()}")


def _siblings(path: Path) -> list[str]:
    parent = path.parent
    return [str(p.parent) for p in parent.glob("*/config.json")]


def _from_hub(name: str, weights: bool) -> Path:
    repo, _, revision = name.partition("@")
    directory = _fetch(repo, revision, PLAIN, ["*/*"])
    if not (directory / "config.json").is_file():
        raise UserError(f"{name} is not a checkpoint: it has no config.json{_import_hint(repo, directory)}")
    check_causal(directory)
    if not weights or (directory / SINGLE).is_file():
        return directory
    index = directory / INDEX
    files = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE]
    directory = _fetch(repo, revision, files)
    if not all((directory / file).is_file() for file in files):
        raise UserError(f"{name} has no {files[0]}{_import_hint(repo, directory)}")
    return directory


def _fetch(repo: str, revision: str, patterns: list[str], ignored: list[str] | None = None) -> Path:
    """Return the local directory of a hub repository, with the files of these patterns.

    Raises:
        UserError: they are neither in the hub's cache nor can be downloaded.
    """
    from huggingface_hub import constants, errors, snapshot_download

    name, offline = f"{repo}@{revision}" if revision else repo, offline_reason()
    try:
        directory = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=ignored,
            local_files_only=bool(offline),
        )
        return Path(directory)
    except errors.GatedRepoError:
        reason = f"access must be requested at {constants.ENDPOINT}/{repo}; then run hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private (then run hf auth login)"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except errors.LocalEntryNotFoundError as error:
        offline = offline or " ".join(str(error.__cause__ or error).split())[:160]
        reason = (
            f"the hub cannot be reached ({offline}), and its cache lacks files; name a directory, "
            "or start with draftlab init --preset tiny"
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    local = _siblings(Path(name))
    hint = did_you_mean(name, local) if local else ""
    raise UserError(f"{name} is not a directory and could not be downloaded: {reason}{hint}")


def _import_hint(repo: str, directory: Path) -> str:
    """Return the end of a message with the commands that import another layout of a repository, '' if it has none."""
    from huggingface_hub import HfApi

    files = [] if offline_reason() else HfApi().list_repo_files(repo, revision=directory.name)
    kinds = [".gguf", "adapter_config.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    other = next((file for kind in kinds for file in files if file.endswith(kind)), None)
    if other is None:
        return ""
    folder = repo.split("/")[1]
    source = f"{folder}/{other}" if other.endswith(".gguf") else folder
    fetch = shlex.join(["hf", "download", repo, *([other] if source != folder else []), "--local-dir", folder])
    convert = shlex.join(["draftlab", "import", source, "--out", f"{folder}-imported"])
    return f", but {other}; import it with: {fetch} && {convert}"
