"""python -m draftlab_research.import_paper_trace: store the texts of a paper's trace, for replay with drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftlab.cli import run_alone
from draftlab.commands.base import Command, Outcome
from draftlab.config.base import OutputConfig, option
from draftlab.data.prompts import file_prompts
from draftlab.model import checkpoint, hub
from draftlab.output import Output
from draftlab.runs import provenance
from draftlab.sampling import SamplingParams
from draftlab.target_outputs.build import REPLAY_SHARD
from draftlab.target_outputs.outputs import TargetOutput
from draftlab.target_outputs.store import Manifest, logits_of, vocabulary_sha256, write_store
from draftlab_research.paper_trace import trace_outputs


class ImportPaperTraceConfig(OutputConfig):
    file: Path = option(help="Trace file, which has a tensor([[...]]) of token ids for each prompt.", argument=True)
    prompt_file: Path = option(help="JSON-lines file with the prompts of the trace.")
    target: str = option(help="Checkpoint or directory that has the tokenizer of the target.")
    name: str = option("llama-65b", "Name of the target that wrote the texts, for the record.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTrace:
    file: Path
    prompt_file: Path
    target: str
    target_name: str

    @property
    def name(self) -> str:
        return f"outputs-{self.target_name}"

    def run(self, output: Output) -> Manifest:
        """Write the store. Raises UserError: the trace or the prompts cannot be read, or do not fit the tokenizer."""
        directory = hub.locate_tokenizer(self.target)
        tokenizer, eos = checkpoint.load_tokenizer(directory), checkpoint.eos_token_ids(directory)
        prompts = file_prompts(self.prompt_file, tokenizer, count=None)
        outputs, longest = trace_outputs(self.file, prompts.rows, vocab=logits_of(directory), eos_ids=eos)
        manifest = Manifest(
            source="paper",
            target=self.target_name,
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

        def shard(number: int) -> Sequence[TargetOutput]:
            return outputs[number * REPLAY_SHARD : (number + 1) * REPLAY_SHARD]

        output.inputs([self.file, self.prompt_file])
        manifest = write_store(output.out, manifest, shard, tokenizer=directory)
        output.record(output.out)
        return manifest


def prepare(config: ImportPaperTraceConfig, weights: bool) -> PaperTrace:
    return PaperTrace(file=config.file, prompt_file=config.prompt_file, target=config.target, target_name=config.name)


def show(manifest: Manifest, config: ImportPaperTraceConfig, out: Path) -> Outcome:
    facts: dict[str, object] = {
        "path": str(out),
        "sequences": manifest.sequences,
        "tokens": manifest.tokens,
    }
    shown = f"{manifest.sequences} texts with {manifest.tokens:,} tokens"
    return Outcome(path=out, show=[shown, str(out)], data=facts)


IMPORT_PAPER_TRACE = Command(
    name="import-paper-trace",
    config=ImportPaperTraceConfig,
    module=__name__,
    help='Store the texts of a trace file of the paper "Decoding Speculative Decoding" as target outputs.',
    resumes=True,
)


if __name__ == "__main__":
    run_alone(IMPORT_PAPER_TRACE)
