"""Scripts that serve a target with a draft, one for each runtime. No torch.

Options are those of vLLM 0.32, SGLang as of 2026-11, llama.cpp as of llama-cpp-python 0.3.36, TensorRT-LLM 1.4 and
transformers 5.23.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Literal, NamedTuple

from draftlab.config.server_rules import SampleMethod
from draftlab.drafters.prompt_lookup import PROMPT_LOOKUP_MAX
from draftlab.latency.k_schedule import Ranges
from draftlab.trust import printable

DraftKind = Literal["draft model", "parallel draft", "EAGLE-3 head", "prompt lookup"]
VLLM_METHODS: dict[DraftKind, str] = {"EAGLE-3 head": "eagle3"}
DIRECTORY = 'here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)'
ABOVE_ZERO = "above temperature 0 a drafted token stands with the target's probability of it"


class Sampling(NamedTuple):
    """The draft's proposals above temperature 0, where the server has a setting for them."""

    method: SampleMethod
    reason: str


DEFAULT_SAMPLING = Sampling("probabilistic", "a default; export --verify-with --temperature compares it with greedy")


def script(
    runtime: str, *, target: str, k: int, k_reason: str, gguf: str = "", kind: DraftKind = "draft model",
    layer_ids: Sequence[int] = (), heterogeneous: bool = False, k_by_batch: Ranges | None = None,
    sampling: Sampling = DEFAULT_SAMPLING,
) -> tuple[str, str]:  # fmt: skip
    """Return name and text of a script that lies in the draft's directory. Control characters become escapes.

    gguf: the draft's file, for llama.cpp. A parallel draft drafts in one pass where the runtime can. layer_ids: of an
    EAGLE-3 head, see eagle.HeadConfig. heterogeneous: the draft has a vocabulary of its own. k_by_batch: for vLLM, see
    k_schedule.py. sampling: for vLLM.
    """
    target, k_reason, gguf = printable(target), printable(k_reason), printable(gguf)
    match runtime:
        case "transformers":
            return "assist.py", _transformers(target, k, k_reason, kind, heterogeneous)
        case "vllm":
            config = speculative_config(
                "@", k, kind, sampling.method, heterogeneous=heterogeneous, k_by_batch=k_by_batch
            )
            lines = _vllm(target, config, sampling.reason)
        case "speculators":
            lines = ["# sh serve.sh [options of vllm serve]", DIRECTORY, 'exec vllm serve "$here" "$@"']
        case "tensorrt-llm":
            lines = _tensorrt_llm(target, k, kind, layer_ids)
        case "sglang":
            lines = _sglang(target, k, kind)
        case _:
            lines = _llama_cpp(target, k, gguf, kind)
    return "serve.sh", "\n".join(["#!/bin/sh", f"# K = {k}: {k_reason}", *lines, ""])


def speculative_config(
    draft: str, k: int, kind: DraftKind, sample_method: SampleMethod = "greedy", *, heterogeneous: bool = False,
    k_by_batch: Ranges | None = None,
) -> dict[str, object]:  # fmt: skip
    """Return vLLM's --speculative-config.

    k: the largest of k_by_batch. sample_method: prompt lookup has none, its tokens are certain.
    """
    if kind == "prompt lookup":
        window = {"prompt_lookup_max": PROMPT_LOOKUP_MAX, "prompt_lookup_min": 1}
        return {"method": "ngram", "num_speculative_tokens": k, **window}
    method = VLLM_METHODS.get(kind, "draft_model")
    config: dict[str, object] = {"method": method, "model": draft, "num_speculative_tokens": k}
    config |= {"use_heterogeneous_vocab": True} if heterogeneous else {}
    config |= {"num_speculative_tokens_per_batch_size": k_by_batch} if k_by_batch else {}
    config |= {"parallel_drafting": True} if kind == "parallel draft" else {}
    return config | {"draft_sample_method": sample_method}


def _vllm(target: str, settings: dict[str, object], reason: str) -> list[str]:
    method, config = settings.get("draft_sample_method"), json.dumps(settings).replace('"', '\\"')
    speculative = '"' + config.replace("@", "$here") + '"'
    about = f"draft_sample_method = {method}, above temperature 0: {printable(reason)}" if method else ABOVE_ZERO
    return [
        f"# {about}",
        "# sh serve.sh [options of vllm serve]; the draft runs on as many devices as the target",
        DIRECTORY,
        f'exec vllm serve {shlex.quote(target)} --speculative-config {speculative} "$@"',
    ]


def _tensorrt_llm(target: str, k: int, kind: DraftKind, layer_ids: Sequence[int]) -> list[str]:
    decoding_type = {"parallel draft": "PARD", "EAGLE-3 head": "Eagle3"}.get(kind, "Draft_Target")
    captured = ", ".join(str(i - 1) for i in layer_ids)  # it counts the layer whose output is read
    return [
        "# sh serve.sh [options of trtllm-serve]; untested",
        DIRECTORY,
        'cat > "$here/speculative.yaml" <<END',
        "speculative_config:",
        f"  decoding_type: {decoding_type}",
        f"  max_draft_len: {k}",
        "  speculative_model: $here",
        *([f"  eagle3_layers_to_capture: [{captured}]"] if layer_ids else []),
        "END",
        f'exec trtllm-serve {shlex.quote(target)} --extra_llm_api_options "$here/speculative.yaml" "$@"',
    ]


def _sglang(target: str, k: int, kind: DraftKind) -> list[str]:
    if kind == "prompt lookup":
        return [
            "# sh serve.sh [options of sglang.launch_server]; untested",
            f"exec python -m sglang.launch_server --model-path {shlex.quote(target)} \\",
            f'    --speculative-algorithm NGRAM --speculative-num-draft-tokens {k + 1} "$@"',
        ]
    algorithm = "EAGLE3" if kind == "EAGLE-3 head" else "STANDALONE"
    options = f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    return [
        f"# {ABOVE_ZERO}; thresholds below 1 are lossy, and speculative_use_rejection_sampling stays off",
        "# sh serve.sh [options of sglang.launch_server]; untested",
        DIRECTORY,
        f"exec python -m sglang.launch_server --model-path {shlex.quote(target)} \\",
        f'    --speculative-algorithm {algorithm} --speculative-draft-model-path "$here" {options} "$@"',
    ]


def _llama_cpp(target: str, k: int, gguf: str, kind: DraftKind) -> list[str]:
    usage = (
        f"# sh serve.sh TARGET.gguf [options of llama-server]; draftlab export {target} --to gguf writes TARGET.gguf"
    )
    target_file = "target=${1:?GGUF file of the target}; shift"
    if kind == "prompt lookup":  # nothing shorter than what is looked up is drafted
        return [
            usage, target_file, 'exec llama-server --model "$target" --spec-type ngram-simple \\',
            f"    --spec-ngram-simple-size-n {min(PROMPT_LOOKUP_MAX, k)} --spec-ngram-simple-size-m {k} " + '"$@"',
        ]  # fmt: skip
    spec_type = "draft-eagle3" if kind == "EAGLE-3 head" else "draft-simple"
    older = "# builds before 2026: --model-draft FILE --draft-max K --draft-min 1 --draft-p-min 0"
    return [
        f"# {ABOVE_ZERO}: there is nothing to set",
        usage,
        *([older] if kind == "draft model" else []),
        DIRECTORY,
        target_file,
        f'exec llama-server --model "$target" --spec-type {spec_type} \\',
        f'    --spec-draft-model "$here"/{shlex.quote(gguf)} --spec-draft-n-max {k} "$@"',
    ]


def _transformers(target: str, k: int, k_reason: str, kind: DraftKind, heterogeneous: bool) -> str:
    draft, options = _ASSISTANT.format(k=k), "assistant_model=draft"
    if kind == "prompt lookup":
        draft, options = "", f"prompt_lookup_num_tokens={k}, max_matching_ngram_size={PROMPT_LOOKUP_MAX}"
    elif heterogeneous:
        options += ", tokenizer=tokenizer, assistant_tokenizer=AutoTokenizer.from_pretrained(here)"
    return f"""# python assist.py "a prompt"; K = {k}: {k_reason}
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

target, here = {target!r}, Path(__file__).resolve().parent
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
{draft}inputs = tokenizer(sys.argv[1], return_tensors="pt", return_token_type_ids=False).to(model.device)
output = model.generate(**inputs, {options}, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0]))
"""


_ASSISTANT = """draft = AutoModelForCausalLM.from_pretrained(here, dtype=model.dtype).to(model.device)
draft.generation_config.update(
    num_assistant_tokens={k}, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
)
"""
