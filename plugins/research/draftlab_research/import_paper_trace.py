"""python -m draftlab_research.import_paper_trace: store the texts of a paper's trace, for replay with drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftlab.cli import run_alone
from draftlab.commands.base import Job, Outcome, command
from draftlab.config.base import OutputConfig, option
from draftlab.output import Output

if TYPE_CHECKING:
    from draftlab.target_outputs.outputs import TargetOutput
    from draftlab.target_outputs.store import Manifest


class ImportPaperTraceConfig(OutputConfig):
    file: Path = option(help="Trace file, which has a tensor([[...]]) of token ids for each prompt.", argument=True)
    prompt_file: Path = option(help="JSON-lines file with the prompts of the trace.")
    target: str = option(help="Checkpoint or directory that has the tokenizer of the target.")
    name: str = option("llama-65b", "Name of the target that wrote the texts, for the record.")


def prepare(config: ImportPaperTraceConfig, weights: bool) -> Job[ImportPaperTraceConfig]:
    return Job(lambda _: config, f"outputs-{config.name}")


@command(ImportPaperTraceConfig, prepare=prepare, resumes=True)
def import_paper_trace(config: ImportPaperTraceConfig, output: Output) -> Outcome:
    """Store the texts of a trace file of the paper "Decoding Speculative Decoding" as target outputs."""
    manifest = _write(config, output)
    facts: dict[str, object] = {
        "path": str(output.out),
        "sequences": manifest.sequences,
        "tokens": manifest.tokens,
    }
    shown = f"{manifest.sequences} texts with {manifest.tokens:,} tokens"
    return Outcome(path=output.out, show=[shown, str(output.out)], data=facts)


def _write(config: ImportPaperTraceConfig, output: Output) -> "Manifest":
    from draftlab.data.prompts import file_prompts
    from draftlab.model import checkpoint, hub
    from draftlab.runs import provenance
    from draftlab.sampling import SamplingParams
    from draftlab.target_outputs.build import REPLAY_SHARD
    from draftlab.target_outputs.store import Manifest, logits_of, vocabulary_sha256, write_store
    from draftlab_research.paper_trace import trace_outputs

    directory = hub.locate_tokenizer(config.target)
    tokenizer, eos = checkpoint.load_tokenizer(directory), checkpoint.eos_token_ids(directory)
    prompts = file_prompts(config.prompt_file, tokenizer, count=None)
    outputs, longest = trace_outputs(config.file, prompts.rows, vocab=logits_of(directory), eos_ids=eos)
    manifest = Manifest(
        source="paper",
        target=config.name,
        target_sha256=None,
        vocab=logits_of(directory),
        tokenizer_sha256=vocabulary_sha256(directory),
        dtype="float16",
        batch_size=1,
        text="target",
        data=prompts.source,
        selection=prompts.selection,
        prompt_tokens=None,
        categories=prompts.categories,
        sampling=SamplingParams(max_tokens=longest, stop_token_ids=eos),
        logprobs="none",
        top_logprobs=0,
        temperatures=(1.0,),
        seq_len=None,
        seed=0,
        planned=len(prompts.rows),
        versions=provenance.versions(),
    )

    def shard(number: int) -> "Sequence[TargetOutput]":
        return outputs[number * REPLAY_SHARD : (number + 1) * REPLAY_SHARD]

    output.inputs([config.file, config.prompt_file])
    manifest = write_store(output.out, manifest, shard, tokenizer=directory)
    output.record(output.out)
    return manifest


if __name__ == "__main__":
    run_alone(import_paper_trace)
