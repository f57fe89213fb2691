"""The command outputs info, which shows what a store of target outputs contains."""

from dataclasses import replace

from draftlab.commands.base import Outcome
from draftlab.commands.models import located_target
from draftlab.commands.stores import served_target, shown
from draftlab.config.outputs import OutputsInfoConfig
from draftlab.model import devices
from draftlab.runs import workspace
from draftlab.target_outputs.store import describe, read_manifest
from draftlab.target_outputs.targets import INT8, LocalTarget, StoreCheck, StoreVerification


def prepare(config: OutputsInfoConfig, weights: bool) -> StoreCheck:
    """Check the settings of the command `outputs info`, and return the job.

    With --verify, the job compares the outputs with the target.

    Raises:
        UserError: The directory has no stored outputs, or the target is missing.
    """
    manifest = read_manifest(config.directory)
    if not config.verify:
        return StoreCheck(directory=config.directory, target=None)
    directory = located_target(config.target, tokenizer_only=config.server is not None, weights=True)
    if config.server is not None:
        target = served_target(config, config.server, directory, None, manifest.top_logprobs)
    else:  # the target runs in the data type in which it wrote the sequences
        device = devices.resolve_device(workspace.load().device)
        dtype = devices.DTYPES.get(manifest.dtype)
        target = LocalTarget(directory, device, dtype, batch_size=1, int8=manifest.dtype == INT8)
    return StoreCheck(directory=config.directory, target=target)


def show(result: StoreVerification | None, config: OutputsInfoConfig) -> Outcome:
    directory = config.directory
    outcome = shown(directory, read_manifest(directory), describe(directory))
    if result is None:
        return outcome
    text = (
        f"{result.shards} shards match their checksums. The target computed {result.sequences} sequences again: "
        f"log-probabilities differ by {result.mean:.4f} on average and {result.worst:.4f} at most, and the most "
        f"probable token is the same at {result.same_top:.2%} of the positions"
    )
    missed = (
        []
        if result.good
        else [f"{directory} differs from what the target computes now; check the target, or build the outputs again"]
    )
    return replace(
        outcome,
        show=[*outcome.show, text],
        data=outcome.data | {"verified": result.as_dict()},
        missed=missed,
    )
