"""Checks of heads on a target's states: which servers take them, and what each wants.

Their requirements were read in vLLM 0.32, SGLang 0.5.23, llama.cpp as of llama-cpp-python 0.3.36 and TensorRT-LLM 1.4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftlab.engine.generate import Drafter, speculative_decode
from draftlab.errors import UserError
from draftlab.exporting import gguf, gguf_tokenizer
from draftlab.exporting.compatibility import VLLM_CPU_HEADS, Finding, error, ok, warning
from draftlab.model import checkpoint, eagle
from draftlab.model.decoder import Decoder
from draftlab.model.eagle import HeadConfig
from draftlab.sampling import SamplingParams

K = 3  # drafted tokens of the trial
USELESS = 1.05  # tokens per target pass
NORMED = "adds the attention to states that are not normed, and the head was trained with norm_before_residual"
RETRAIN = "train it without --norm-before-residual, or serve it with vLLM or llama.cpp"
TARGET_CONTEXT = 2048  # where its configuration names none


def check_files(folder: Path, target: Path, runtimes: Sequence[str]) -> list[Finding]:
    """Compare the files of heads and their target; the target's weights are not needed."""
    try:
        config, content = eagle.check(folder, target), checkpoint.read_config(folder)
        eagle.read(folder, target, checkpoint.stored_dtype(folder))
    except UserError as failure:
        return [error("head", str(failure), "train one with draftlab distill --student eagle")]
    layers, ids = ", ".join(map(str, config.layer_ids)), f"{config.draft_vocab:,} of {config.vocab:,} ids"
    norm = f"norm_before_residual {str(config.norm_before_residual).lower()}"
    findings = [ok("head", f"reads the states after {layers} layers, predicts {ids}, {norm}")]
    if (context := checkpoint.max_model_len(target, TARGET_CONTEXT)) > config.context:
        text = f"{config.context:,} tokens, the target's {context:,}: it drafts worse on longer texts"
        findings.append(warning("context", text, "train with a longer --seq-len"))
    for runtime in runtimes:
        own = [*_stored_as(content, config, runtime), *check_exported(config, target, runtime)]
        findings += own or [ok(runtime, WANTS[runtime])]
    return findings


def check_exported(config: HeadConfig, target: Path, runtime: str) -> Iterator[Finding]:
    """Say what keeps a runtime from a head that draftlab has exported for it."""
    yield from EXPORTED[runtime](config, target)


def check_acceptance(target: Decoder, drafter: Drafter, prompts: Sequence[list[int]], most: int = K) -> Finding:
    """Decode a little with heads. most: tokens that they can draft."""
    k, sampling = min(K, most), SamplingParams(max_tokens=24)
    steps = [step for ids in prompts for step in [*speculative_decode(target, drafter, [ids], k, sampling)][1:]]
    length = sum(len(step.tokens) for step in steps) / len(steps)
    text = f"{length:.2f} tokens per target pass at K = {k} on {len(prompts)} prompts, greedily"
    if length < USELESS:
        fix = "it learnt on other states, or is read with another norm_before_residual or other layers"
        return error("acceptance", text, fix)
    return ok("acceptance", text)


def _stored_as(content: Mapping[str, Any], config: HeadConfig, runtime: str) -> Iterator[Finding]:
    """Say what a runtime misses in a head's own config.json, which draftlab export writes."""
    speculators, export = "speculators_model_type" in content, f"draftlab export --to {runtime}"
    layers = (content.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if speculators and runtime in ("sglang", "tensorrt-llm"):
        yield error(runtime, "does not read speculators' layout", f"{export} writes SpecForge's")
    elif runtime == "sglang" and layers != [i - 1 for i in config.layer_ids]:
        yield error(runtime, f"reads layers from eagle_config, which has {layers or 'none'}", f"{export} writes them")
    if runtime == "vllm" and speculators and "norm_before_residual" not in content:
        text = "takes norm_before_residual for true where config.json is silent, and speculators trains without it"
        yield error(runtime, text, f"{export} writes what draftlab reads")
    if runtime == "vllm" and not speculators and len(config.layer_ids) != len(layers or "abc"):
        yield error(runtime, f"counts the layers in eagle_config, and {layers or 'none'} are there", export)


def _vllm(config: HeadConfig, _: Path) -> Iterator[Finding]:
    if config.head_dim not in VLLM_CPU_HEADS:
        text = f"head_dim {config.head_dim}; its CPU build supports {', '.join(map(str, VLLM_CPU_HEADS))}"
        yield warning("vllm", text, "run it on a GPU")


def _not_normed(runtime: str) -> Callable[[HeadConfig, Path], Iterator[Finding]]:
    def check(config: HeadConfig, _: Path) -> Iterator[Finding]:
        if config.norm_before_residual:
            yield error(runtime, NORMED, RETRAIN)

    return check


def _llama_cpp(config: HeadConfig, target: Path) -> Iterator[Finding]:
    if len(config.layer_ids) != 3:
        yield error("llama.cpp", f"reads three layers, and the head {len(config.layer_ids)}", "train it with three")
    try:
        gguf.architecture(target)
        gguf_tokenizer.read_tokenizer(target, config.vocab)
    except UserError as failure:
        yield error("llama.cpp", str(failure))


def _transformers(_: HeadConfig, __: Path) -> Iterator[Finding]:
    yield warning("transformers", "has no EAGLE-3", "serve it with vLLM, SGLang, llama.cpp or TensorRT-LLM")


EXPORTED: dict[str, Callable[[HeadConfig, Path], Iterator[Finding]]] = {
    "vllm": _vllm,
    "sglang": _not_normed("sglang"),
    "llama.cpp": _llama_cpp,
    "tensorrt-llm": _not_normed("tensorrt-llm"),
    "transformers": _transformers,
}
WANTS = {
    "vllm": "loads it as it is, by --speculative-config with method eagle3",
    "sglang": "loads it as it is, by --speculative-algorithm EAGLE3",
    "llama.cpp": "loads it as GGUF: draftlab export --to llama.cpp; --spec-type draft-eagle3",
    "tensorrt-llm": "loads it as it is, with the layers in its options: draftlab export --to tensorrt-llm",
}
