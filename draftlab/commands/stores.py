"""What the commands on stores of target outputs share: how they find the target, and how they show a store."""

from collections.abc import Mapping
from pathlib import Path

from draftlab.commands.base import Outcome
from draftlab.config.shared import ServerSettings
from draftlab.errors import about
from draftlab.sampling import SamplingParams
from draftlab.servers.client import Server
from draftlab.target_outputs.store import Manifest
from draftlab.target_outputs.targets import ServedTarget, Target


def served_target(config: ServerSettings, url: str, directory: Path, sampling: SamplingParams | None, k: int) -> Target:
    """Return the target that a server runs. Arguments: As in ServedTarget.connected."""
    with about("--server"):
        server = Server.connect(url, config.api_key_file, model=config.served_model_name)
    return ServedTarget.connected(server, directory, sampling, k)


def shown(directory: Path, manifest: Manifest, facts: Mapping[str, object]) -> Outcome:
    """Return the outcome of a command on a store of target outputs. facts: Further facts to show."""
    size = sum(f.stat().st_size for f in directory.rglob("*.safetensors"))
    per_token = size / max(1, manifest.tokens)
    lists = written = ""
    if manifest.top_logprobs:
        lists = f"the {manifest.top_logprobs} most probable of {manifest.vocab:,} tokens"
        lists += f" stored, 1/{2 * manifest.vocab / per_token:,.0f} of the bytes of fp16 logits; "
    if (sampling := manifest.sampling) is not None:
        written = f"{sampling.describe()}, at most {sampling.max_tokens} tokens each; "
    text = [
        str(directory),
        f"{manifest.sequences:,} of {manifest.planned:,} sequences, {manifest.tokens:,} tokens, {size / 1e6:,.1f} MB "
        f"({per_token:.0f} bytes per token)",
        f"{manifest.target} ({manifest.source}); {lists}text: {written}{manifest.data} ({manifest.text}"
        f"{', chat' if manifest.chat else ''})",
        *(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items() if value),
    ]
    data = {"path": str(directory), **manifest.model_dump(mode="json"), "bytes": size, **facts}
    return Outcome(path=directory, show=text, data=data)
