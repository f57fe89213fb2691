"""Settings that several commands share, named as in transformers, TRL and vLLM."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator

from draftlab.config.base import (
    SERVER,
    TRAINING,
    Only,
    advanced_option,
    from_workspace,
    option,
    parsed,
)
from draftlab.errors import UserError, did_you_mean
from draftlab.model.shape import parse_count, parse_vocab
from draftlab.registry import CROSS_ENTROPY, LOSSES
from draftlab.runs import workspace

WeightsDtype = Literal["auto", "float32", "bfloat16", "float16"]
EngineMode = Literal["auto", "eager", "native", "graphs"]
ChatMode = Literal["auto", "on", "off"]
LossOn = Literal["assistant", "all"]
Optimizer = Literal["adamw", "muon"]
TrainingDtype = Literal["auto", "float32", "bfloat16"]
SAMPLING = "Sampling"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "cpu", "cuda")


def _vocab(value: object) -> object:
    return parsed(parse_vocab, value) if isinstance(value, str) else value


Vocab = Annotated[int | None, BeforeValidator(_vocab)]  # written 16k or 16384


def target(**others: Any) -> Any:
    text = "Checkpoint of the target: a directory or a hub name, optionally with @REVISION."
    return from_workspace("target", text, **others)


def source() -> Any:
    return from_workspace("source", "Checkpoint from which drafts are cut.")


def data(help: str = "Text: one SOURCE, or a mixture, SOURCE=WEIGHT,SOURCE=WEIGHT.", **others: Any) -> Any:
    return from_workspace("data", help, reads="text", **others)


def _known_device_map(name: str | None) -> str | None:
    if name is not None and name not in DEVICE_MAPS and not (name.endswith(".json") and Path(name).is_file()):
        raise ValueError(f"must be {', '.join(DEVICE_MAPS)}, or a .json file of module: device pairs")
    return name


def _count(value: str | None) -> str | None:
    if value is not None:
        parsed(parse_count, value)
    return value


def _loss(spec: str) -> str:
    known = [CROSS_ENTROPY, *LOSSES.names()]
    if unknown := sorted(names(spec) - set(known)):
        raise ValueError(f"unknown loss {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return spec


def names(spec: str) -> set[str]:
    """Return the set of names in a text that describes a loss or a mixture of training texts.

    For "fkl@0.2 -> 0.5*lk(3)" the set is {"fkl", "lk"}.

    Names are in lower case, and have at least two letters.
    """
    return set(re.findall(r"[a-z][a-z_]+", spec.lower()))


DeviceMap = Annotated[str | None, AfterValidator(_known_device_map)]
Count = Annotated[str | None, AfterValidator(_count)]  # number of parameters, written 1.3b
LossName = Annotated[str, AfterValidator(_loss)]


def device() -> Any:
    return from_workspace("device", "Device: auto, or a torch device such as cpu, cuda or cuda:1.", advanced=True)


def dtype(**others: Any) -> Any:
    return from_workspace(
        "dtype",
        "Data type of weights; auto: bfloat16 on CUDA; on a CPU the checkpoint's, if passes are as fast in it as in "
        "float32, else float32.",
        **others,
    )


def seed() -> Any:
    return advanced_option(0, "Seed of all random choices.", ge=0, le=2**32 - 1)


def threads() -> Any:
    return option(None, "Number of CPU threads. Default: torch's choice.", ge=1)


def mode() -> Any:
    return option(
        "auto",
        "How forward passes run. native: C++ on CPUs; graphs: CUDA graphs; eager: torch; auto: the fastest of these "
        "that runs here.",
    )


def device_map() -> Any:
    return advanced_option(
        None,
        "Device map of accelerate for the target's layers; auto spreads the layers over GPUs, CPU memory and disk.",
    )


def reweigh_steps() -> Any:
    return advanced_option(
        0,
        "Number of steps between updates of a mixture's weights from held-out losses, as in Sheared LLaMA; 0: fixed "
        "weights.",
        ge=0,
        panel=TRAINING,
    )


def reference_losses(default: str) -> Any:
    return advanced_option(
        None,
        "Expected loss of each source in nats per token, as SOURCE=NATS,... with the name or domain of the source; or "
        f"a checkpoint, whose losses are then the expected losses. Default: the losses of the {default}.",
        panel=TRAINING,
    )


def prompt_file(**others: Any) -> Any:
    return option(
        None,
        "JSON-lines file of prompts, with the key prompt (or messages, turns, text, question) and optionally category.",
        **others,
    )


def chat(**others: Any) -> Any:
    text = "Apply the chat template to the prompts of a file; auto: only if the tokenizer has a template."
    return option("auto", text, **others)


def system_prompt(**others: Any) -> Any:
    return advanced_option(None, "System prompt of every conversation.", **others)


def api_key_file() -> Any:
    text = "File with the server's API key."
    return advanced_option(None, text, panel=SERVER, reads="nothing", acts="always")


def served_model_name() -> Any:
    return advanced_option(
        None,
        "Name of the model on the server. Needed if the server has several models.",
        panel=SERVER,
    )


KEY_RULE = Only(("api_key_file", "served_model_name"), lambda c: c.server, "needs --server URL")
ONE_SOURCE = Only(
    ("data",),
    lambda c: c.prompt_file is None,
    "leave it out, because --prompt-file has the prompts",
)
CHAT_RULES = (
    Only(("chat",), lambda c: c.prompt_file is not None, "works only with --prompt-file FILE", refused=False),
    Only(("system_prompt",), lambda c: c.prompt_file is not None, "needs --prompt-file FILE"),
    Only(
        ("system_prompt",),
        lambda c: c.chat != "off",
        "needs the chat template; leave out --chat off",
    ),
)


def newest_output(*commands: str, ready: bool = False) -> Path:
    """Return the newest output directory of these commands in the workspace's folder of outputs.

    ready: Whether to return the draft in draftlab.yaml if there is no such output.

    Raises:
        UserError: There is no such output, and no draft to return in its place.
    """
    space = workspace.load()
    path = workspace.newest(space.runs, commands)
    if path is None and ready and space.draft is not None:
        return Path(space.draft)
    if path is None:
        raise UserError(
            f"{space.runs} has no output of draftlab {' or '.join(commands)}; run draftlab {commands[-1]} first, or "
            "name a draft"
        )
    return path


def newest_draft() -> Path:
    """Return the newest draft in the workspace's folder of outputs, or the draft in draftlab.yaml if there is none.

    Raises:
        UserError: There is no draft.
    """
    return newest_output("distill", "prune", ready=True)


class CheckpointSettings(BaseModel):
    """The settings of commands that load checkpoints."""

    trust_remote_code: bool = advanced_option(
        False, "Run the Python code in checkpoints. Use this only for authors whom you trust."
    )


class ServerSettings(BaseModel):
    """The settings of a running server, which runs the target in place of a local checkpoint."""

    server: str | None = option(
        None,
        "Server that runs the target, http://HOST:PORT, in place of a local checkpoint.",
        panel=SERVER,
        acts="always",
    )
    api_key_file: Path | None = api_key_file()
    served_model_name: str | None = served_model_name()


class SamplingSettings(BaseModel):
    """The settings of sampling."""

    top_k: int = advanced_option(
        0,
        "Sample only from this number of the most probable tokens; 0: from all tokens.",
        ge=0,
        panel=SAMPLING,
    )
    top_p: float = advanced_option(
        1.0,
        "Sample only from the smallest set of most probable tokens whose probabilities sum to at least this.",
        gt=0,
        le=1,
        panel=SAMPLING,
    )
    min_p: float = advanced_option(
        0.0,
        "Leave out tokens less probable than this factor times the probability of the most probable token.",
        ge=0,
        le=1,
        panel=SAMPLING,
    )
    temperature: float = option(0.0, "Temperature; 0 is greedy.", ge=0, panel=SAMPLING)


def draft_vocab(counted_in: str, **others: Any) -> Any:
    return option(
        None,
        f"Trim the draft's vocabulary to this number of token ids, such as 16k or 16384: the most frequent in "
        f"{counted_in}.",
        typed=str,
        **others,
    )
