"""Assisted generation of transformers 5.23, which a Python script runs."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from draftlab.config.server_rules import DecodingRule
from draftlab.sampling import FILTERS
from draftlab.servers.kinds import (
    PROMPT_LOOKUP_MAX,
    Artifact,
    Finding,
    Launch,
    ServerKind,
    error,
    server,
)
from draftlab.shell import typed


@server("transformers")
class Transformers(ServerKind):
    # universal assisted decoding (Timor et al. 2025, 2502.05202)
    translates = "it encodes the text again at every step and, when it samples, drafts shared tokens only"
    one_stream = True
    # generate() passes the target's filters to the draft, whose own generate() adds them again
    rules: ClassVar[Mapping[str, DecodingRule]] = {"": DecodingRule("rejection", draft=(*FILTERS, *FILTERS))}

    def check_vocabulary(self, artifact: Artifact) -> Iterator[Finding]:
        yield from super().check_vocabulary(artifact)
        if artifact.difference() is not None and artifact.vocab == artifact.target_vocab:
            text = (
                "accepts a draft with another vocabulary only if the numbers of logits differ, but both models have "
                f"{artifact.vocab:,}"
            )
            yield error(
                self.name,
                text,
                typed("mergekit-tokensurgeon", artifact.path, artifact.target, "OUT"),
            )

    def lookup(self, device: str) -> str:
        return "prompt-lookup"

    def script(self, launch: Launch) -> tuple[str, str]:
        draft = _ASSISTANT.format(k=launch.k)
        options = "assistant_model=draft"
        if launch.kind == "prompt lookup":
            draft = ""
            options = f"prompt_lookup_num_tokens={launch.k}, max_matching_ngram_size={PROMPT_LOOKUP_MAX}"
        elif launch.heterogeneous:
            options += ", tokenizer=tokenizer, assistant_tokenizer=AutoTokenizer.from_pretrained(here)"
        limit = f"# {launch.limit}\n" if launch.limit else ""
        text = f"""# python assist.py "a prompt"; K = {launch.k}: {launch.reason}
{limit}import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

target, here = {launch.target!r}, Path(__file__).resolve().parent
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
{draft}inputs = tokenizer(sys.argv[1], return_tensors="pt", return_token_type_ids=False).to(model.device)


def decode(**options):
    start = time.perf_counter()
    output = model.generate(**inputs, **options, max_new_tokens=64, do_sample=False)
    rate = (output.shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - start)
    return output, f"{{rate:.1f}} tokens/s"


model.generate(**inputs, max_new_tokens=1)  # the first call is slower
_, plain = decode()
output, drafted = decode({options})
print(tokenizer.decode(output[0]))
print(f"{{drafted}} with the draft, {{plain}} without", file=sys.stderr)
"""
        return "assist.py", text


_ASSISTANT = """draft = AutoModelForCausalLM.from_pretrained(here, dtype=model.dtype).to(model.device)
draft.generation_config.update(
    num_assistant_tokens={k}, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
)
"""
