"""Find a checkpoint by its name: an embedded model, a directory, or a model on the Hugging Face hub.

The module also checks that data sets exist, and it does not import torch.
"""

import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import httpx

from draftlab.console import note
from draftlab.errors import UserError, did_you_mean, one_line
from draftlab.model.hf_files import (
    INDEX,
    NOUNS,
    SINGLE,
    Layout,
    check_causal,
    check_has_tokenizer,
    is_multimodal,
    other_layout,
    read_index,
    refuse_other_layout,
    refuse_unconverted,
    weight_files,
)
from draftlab.reading import read_object

EMBEDDED = Path(__file__).parents[1] / "embedded"
# configuration and tokenizer
PLAIN = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
TIMEOUT_SECONDS = 3
HEADS = ("eagle", "peagle", "dflash", "dspark")  # kinds of heads that draftlab or its plug-in supports
# fields of config.json that may have the mask token's id; vLLM reads any of them
MASK_FIELDS = {"mask_token_id", "pard_token", "ptd_token_id"}
IMPORTED = (
    "if it has .bin files or an adapter, run draftlab import NAME; if it has a GGUF file, download that and run "
    "draftlab import FILE"
)
BUILT_IN_TEXT = ("stdlib", "stdlib-tests", "packages")
# folders in the standard library's folder that are not read; encodings and pydoc_data are generated tables
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data"})
JSON_FILES = (".json", ".json.gz")  # an array or an object; many hold JSON lines
ROW_FILES = (*JSON_FILES, ".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
TEXT_SUFFIXES = (*ROW_FILES, ".md", ".py", ".txt")
# GGUF types to which weights can be rounded
ROUNDED = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def locate(name: str | Path, weights: bool = True, known: Iterable[str] = ()) -> Path:
    """Return the directory of a checkpoint. A checkpoint on the Hugging Face hub is downloaded.

    Args:
        name: Name of an embedded model (``tiny``), a directory, or a hub name: OWNER/NAME or OWNER/NAME@REVISION.
        weights: Whether weight files are needed. If False, only configuration and tokenizer are downloaded.
        known: More names that an error may suggest.

    Raises:
        UserError: there is no such checkpoint, it is no causal language model, or its weights are missing or in
            another layout.
    """
    name, path = str(name), Path(name)
    embedded = _embedded()
    if name in embedded:
        return EMBEDDED / name
    if path.is_dir():
        if not (path / "config.json").is_file():
            refuse_other_layout(path)
            raise UserError(f"{path} is not a checkpoint, because it has no config.json; name a Hugging Face directory")
        check_causal(path)
        if weights:
            weight_files(path)
            refuse_unconverted(path, name)
        return path
    if path.is_file():
        refuse_other_layout(path)
        raise UserError(f"{path} is a file; name a directory with config.json and safetensors")
    if not _is_hub_name(name):
        hint = did_you_mean(name, [*embedded, *known, *_siblings(path)])
        raise UserError(f"there is no checkpoint at {name}{hint}")
    return _from_hub(name, weights)


def local(name: str | Path, weights: bool = False) -> Path | None:
    """Return the directory of a checkpoint on this disk, or None for a hub name. The hub is not asked.

    weights: Whether the weight files of a checkpoint on this disk are needed.

    Raises:
        UserError: the errors of locate.
    """
    on_hub = not Path(name).exists() and _is_hub_name(str(name))
    return None if on_hub else locate(name, weights)


def kind_of_name(name: str) -> Literal["embedded", "directory", "hub"] | None:
    """Return how locate would find a checkpoint of this name, or None for a directory that is not there any more.

    The hub is not asked. A name in a folder of this disk is no hub name.
    """
    path = Path(name)
    if name in _embedded():
        return "embedded"
    if path.is_dir():
        return "directory"
    return "hub" if _is_hub_name(name) and not path.parent.is_dir() else None


def _embedded() -> list[str]:
    return sorted(path.name for path in EMBEDDED.iterdir() if path.is_dir())


def _is_hub_name(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME or OWNER/NAME@REVISION."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@.+)?", name) is not None


def import_source(name: str) -> Layout:
    """Return the Layout of a checkpoint to import: a path, or a hub repository with anything but a GGUF file.

    The files of a hub repository are downloaded.

    Raises:
        UserError: there is no such path, draftlab import cannot convert it, or the download failed.
    """
    path = Path(name)
    if not path.exists() and _is_hub_name(name):
        path = _fetch(name, [*PLAIN, "pytorch_model*.bin", "adapter_model.*"])
        path = _with_weights(name, path) if is_multimodal(path) else path
    layout = other_layout(path) if path.exists() else None
    if layout is None:
        raise UserError(f"{path} cannot be imported; draftlab import reads: {', '.join(NOUNS.values())}")
    return layout


def checkpoint_name(directory: Path) -> str:
    """Return a name for a checkpoint: its directory's name or, in the hub's cache, its repository's name."""
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.rpartition("--")[2]
    return directory.absolute().name


def head_kind(name: str | Path) -> str | None:
    """Return the kind of head that a directory's config.json describes, or None if it describes no head.

    Kinds that draftlab does not support, which are not in HEADS, are returned, too. Only config.json is read.
    """
    try:
        content = read_object(Path(name) / "config.json")
    except UserError:
        return None
    if named := content.get("speculators_model_type"):
        return "eagle" if named == "eagle3" else str(named)
    if "markov_rank" in content:
        return "dspark"
    if "dflash_config" in content:
        return "dflash"
    if "draft_vocab_size" in content:
        return "peagle" if MASK_FIELDS & content.keys() else "eagle"
    architectures = content.get("architectures")
    names = [content.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    return "mtp" if any(re.search("mtp|nextn", str(each), re.IGNORECASE) for each in names) else None


def known_head(name: str | Path) -> str | None:
    """Return the kind of head in a directory, from HEADS, or None if the directory has no head.

    Raises:
        UserError: draftlab does not support this kind of head.
    """
    kind = head_kind(name)
    if kind not in (None, *HEADS):
        raise UserError(
            f"{name} is a head of kind {kind}, but draftlab supports only {', '.join(HEADS)}; measure the head in its "
            "server (vLLM has a method mtp): draftlab score --server URL --speculative-server URL"
        )
    return kind


def check_head(name: str | Path, kind: str) -> None:
    """Raise UserError if config.json in a directory does not describe a head of this kind."""
    found = known_head(name)
    if found != kind:
        instead = f"a head of kind {found}; use --drafter {found}:heads={name}" if found else "no head"
        raise UserError(f"{name} is not a head of kind {kind}, because config.json describes {instead}")


def check_data(mixture: str) -> str:
    """Check that the sources of a mixture can be read, and return the mixture.

    mixture: Text of --data, SOURCE=WEIGHT,SOURCE=WEIGHT.

    Raises:
        UserError: a local source cannot be read, or a source is on the hub and the hub cannot be reached.
    """
    on_hub = check_local_data(mixture)
    reason = offline_reason() if on_hub else None
    if reason:
        raise UserError(
            f"data {on_hub[0]!r}: the hub cannot be reached ({reason}); use a local file or folder, or --data stdlib"
        )
    return mixture


def check_local_data(mixture: str) -> list[str]:
    """Check the local sources of a mixture, and return its other sources, which are on the hub.

    Raises:
        UserError: a local source cannot be read.
    """
    names = source_names(mixture)
    for name in names:
        if name not in (*BUILT_IN_TEXT, "") and not name.startswith("hf:"):
            check_local_text(name)
    return [name for name in names if name.startswith("hf:")]


def source_names(mixture: str) -> list[str]:
    """Return the sources of a mixture, SOURCE=WEIGHT,SOURCE=WEIGHT. The weights are not checked."""
    return [part.strip().partition("=")[0] for part in mixture.split(",")]


def split_column(source: str) -> tuple[str, str | None, str]:
    """Split a source SET#COLUMN:DOMAIN into data set, column, and domain.

    Without :DOMAIN, the domain is "". Without #COLUMN, the column is None. Only data sets on the hub and files of rows
    (ROW_FILES) have columns; in any other source, # is part of the name.
    """
    name, _, rest = source.partition("#")
    if not rest or not (name.startswith("hf:") or has_suffix(name, ROW_FILES)):
        return source, None, ""
    column, _, domain = rest.partition(":")
    return name, column, domain


def has_suffix(name: str | Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a name ends in one of the suffixes, in capitals or not."""
    return str(name).lower().endswith(suffixes)


def is_on_disk(source: str) -> bool:
    """Return whether a source is a file or folder on this disk. A #COLUMN in its name is ignored."""
    return Path(split_column(source)[0]).exists()


def check_local_text(source: str) -> None:
    """Raise UserError if a source is neither a file nor a folder, or is a file of a type that cannot be read."""
    path = Path(split_column(source)[0])
    if not path.exists():
        hint = did_you_mean(source, BUILT_IN_TEXT)
        raise UserError(f"data {source!r}: there is no built-in source, file or folder with this name{hint}")
    if path.is_file() and not has_suffix(path, TEXT_SUFFIXES):
        suffix = path.suffix or "'' (no suffix)"
        raise UserError(
            f"data {source!r}: files of type {suffix} cannot be read; use one of {', '.join(TEXT_SUFFIXES)}"
        )


def offline_reason() -> str | None:
    """Return why the hub cannot be reached, or None if it can be reached. Each endpoint is tried once per process."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _connection_error(constants.ENDPOINT)


@functools.cache
def _connection_error(endpoint: str) -> str | None:
    try:
        httpx.head(endpoint, timeout=TIMEOUT_SECONDS)
    except httpx.HTTPError as error:
        return one_line(error) or f"{endpoint} did not answer within {TIMEOUT_SECONDS} s"
    return None


def _siblings(path: Path) -> list[str]:
    parent = path.parent
    return [str(p.parent) for p in parent.glob("*/config.json")]


def _from_hub(name: str, weights: bool) -> Path:
    directory = _fetch(name, PLAIN)
    if not (directory / "config.json").is_file():
        raise UserError(f"{name} is not a checkpoint, because it has no config.json; {IMPORTED}")
    check_causal(directory)
    if weights:
        refuse_unconverted(directory, name)
    return _with_weights(name, directory) if weights else directory


def _with_weights(name: str, directory: Path) -> Path:
    """Download the weights of a hub repository.

    directory: Its directory in the hub's cache, with config.json.

    Raises:
        UserError: the repository has no safetensors, or the errors of _fetch.
    """
    if (directory / SINGLE).is_file():
        return directory
    index = directory / INDEX
    files = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE]
    directory = _fetch(name, files, announced=True)
    if not all((directory / file).is_file() for file in files):
        raise UserError(f"{name} has no {files[0]}; {IMPORTED}")
    return directory


def _fetch(name: str, patterns: list[str], *, announced: bool = False) -> Path:
    """Download the files of a hub repository that match `patterns` and are not in the hub's cache.

    Files in folders of the repository are left out.

    Args:
        name: OWNER/NAME or OWNER/NAME@REVISION.
        announced: Whether to print the size and directory of a download, and to show its progress on a terminal.

    Returns: The repository's directory in the hub's cache.

    Raises:
        UserError: the files are not in the hub's cache and cannot be downloaded.
    """
    from huggingface_hub import constants, errors, snapshot_download
    from tqdm.auto import tqdm

    repo, _, revision = name.partition("@")
    offline = offline_reason()
    download = functools.partial(
        snapshot_download,
        repo,
        revision=revision or None,
        allow_patterns=patterns,
        ignore_patterns="*/*",
        local_files_only=bool(offline),
    )
    try:
        missing = [file for file in download(dry_run=True) if file.will_download] if announced and not offline else []
        if missing:
            size = sum(file.file_size or 0 for file in missing) / 1e9
            note(
                f"downloading {name}, {size:,.2f} GB, to {constants.HF_HUB_CACHE}; to use another model, run "
                "draftlab init --target NAME"
            )
        directory = download(tqdm_class=tqdm if missing and sys.stderr.isatty() else None)
        return Path(directory)
    except errors.GatedRepoError:
        reason = f"the repository is gated: request access at {constants.ENDPOINT}/{repo}, then run hf auth login"
    except errors.LocalEntryNotFoundError as error:
        reason = (
            f"the hub cannot be reached ({offline or one_line(error.__cause__ or error, 160)}), and "
            f"{constants.HF_HUB_CACHE} lacks files of {repo}; name a local directory, or start with draftlab init "
            "--preset tiny"
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 160)}"
    local = _siblings(Path(name))
    hint = did_you_mean(name, local) if local else ""
    raise UserError(f"{name} is not a directory and could not be downloaded: {reason}{hint}")


def locate_model(name: str, weights: bool = True) -> Path:
    """Return the directory of a complete model, see locate.

    Raises:
        UserError: the errors of locate, or the directory has only a head.
    """
    _refuse_head(name)
    return locate(name, weights)


def locate_tokenizer(name: str) -> Path:
    """Return the directory of a tokenizer. It may be in a checkpoint, an embedded model or a hub repository.

    Raises:
        UserError: there is no tokenizer in the directory `name`, or no checkpoint with this name.
    """
    if not Path(name).is_dir():
        return locate(name, weights=False)
    check_has_tokenizer(Path(name))
    return Path(name)


def check_whole(name: str, weights: bool) -> None:
    """Check that a name stands for a complete model on this disk, not only for a head. Hub names are not checked.

    weights: Whether the weight files of a checkpoint on this disk are needed.

    Raises:
        UserError: the directory has only a head, or there is no such checkpoint.
    """
    _refuse_head(name)
    local(name, weights)


def _refuse_head(name: str) -> None:
    if kind := known_head(name):
        raise UserError(
            f"{name} is a head, not a complete model; measure the head with draftlab score --drafter "
            f"{kind}:heads={name}"
        )
