"""vLLM 0.32, and other servers with the same extensions of /v1/completions."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from draftlab.config.server_rules import DecodingRule
from draftlab.model.shape import multiples_near
from draftlab.sampling import Filter, SamplingParams
from draftlab.servers import kinds
from draftlab.servers.kinds import (
    ABOVE_ZERO,
    PROMPT_LOOKUP_MAX,
    SCRIPT_DIRECTORY,
    Answer,
    Artifact,
    DraftKind,
    Finding,
    Launch,
    PromptLogprobs,
    SampleMethod,
    ServedCompletion,
    ServedHead,
    ServerKind,
    ServerTrial,
    check_head_dim,
    error,
    server,
    shell_script,
    unknown_architecture,
    warning,
)

if TYPE_CHECKING:
    from draftlab.model.shape import Shape

TOKEN_PREFIX = "token_id:"  # prefix of tokens with return_tokens_as_token_ids
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
COLDEST = 0.01  # vLLM raises a lower temperature above 0 to this


def _rule(verify: str, draft: tuple[Filter, ...]) -> DecodingRule:
    return DecodingRule(
        verify,
        draft,
        target=("temperature", "top_k", "top_p"),
        refused={"min_p": "vLLM refuses it with speculative decoding"},
        temperature=lambda sent: max(sent, COLDEST) if sent else 0.0,
    )


@server("vllm")
class VLLM(ServerKind):
    parallel = True
    translates = (
        "use_heterogeneous_vocab drafts shared tokens only, and greedily; the draft reads other tokens as unknown "
        "or end of text"
    )
    heads = "loads the directory as it is, with method eagle3 in --speculative-config"
    head_parts = frozenset(
        {
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "sliding_window",
            "qk_norm",
        }
    )
    rules: ClassVar[Mapping[str, DecodingRule]] = {
        "": _rule("rejection", ("temperature",)),  # draft_sample_method probabilistic
        "greedy": _rule("rejection", ()),  # draft_sample_method greedy, the default of vllm serve
        "block": _rule("block", ("temperature",)),  # rejection_sample_method block (2403.10444)
    }
    program = "vllm"
    environment = ("VLLM_API_KEY",)
    owned_by = "vllm"
    path = "/v1/completions"
    about_path = "/version"

    def check_draft(self, artifact: Artifact) -> Iterator[Finding]:
        shape = artifact.shape
        if shape is None:
            yield unknown_architecture(self.name, artifact)
            return
        if shape.head_dim % 8 or shape.head_dim > max(CPU_HEADS):
            fits = f"multiples of 8 up to {max(CPU_HEADS)}"
            text = f"supports only a head_dim among the {fits}, but the draft has head_dim {shape.head_dim}"
            yield error(
                self.name,
                text,
                f"use a draft pruned from a source whose head_dim is among the {fits}",
            )
        else:
            yield from check_head_dim(self.name, shape.head_dim, CPU_HEADS, "run vLLM on a GPU", "on CPUs")
        if artifact.config.get("model_type") == "qwen2" and shape.sizes["q"] != shape.hidden:
            widths = " or ".join(map(str, multiples_near(shape.hidden, shape.head_dim)))
            text = (
                f"needs width = heads x head_dim in a Qwen2, but {shape.heads} x {shape.head_dim} is not {shape.hidden}"
            )
            fix = f"prune with --shape FILE, in which hidden is {widths} and heads is hidden / head_dim"
            yield error(self.name, text, fix)
        devices = [n for n in (1, 2, 4, 8) if _splits(shape, n)]
        if devices != [1, 2, 4, 8]:
            text = (
                "runs a draft on as many devices as the target, but this draft can be split only over "
                f"{', '.join(map(str, devices))}"
            )
            fix = "prune to numbers of heads and FFN neurons that are multiples of the target's --tensor-parallel-size"
            yield warning(self.name, text, fix)

    def check_published(self, artifact: Artifact) -> Iterator[Finding]:
        """See ServerKind. From speculators' layout, vLLM 0.32 does not copy the field fc_norm of P-EAGLE heads."""
        if artifact.config.get("speculators_model_type") == "peagle" and artifact.config.get("fc_norm"):
            text = "ignores fc_norm of a P-EAGLE head in speculators' layout, and refuses its tensors"
            yield error(self.name, text, "train the head with norm_before_fc")

    def check_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        yield from check_head_dim(self.name, head.head_dim, CPU_HEADS, "run vLLM on a GPU", "on CPUs")

    def check_stored_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        export = f"draftlab export --to {self.name}"
        if "speculators_model_type" in artifact.config:
            if "norm_before_residual" not in artifact.config:
                text = "assumes norm_before_residual is true if config.json lacks it, but speculators assumes false"
                yield error(self.name, text, f"{export} writes the value into config.json")
            return
        layers = (artifact.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if len(head.layer_ids) != (len(layers) if layers else 3):
            yield error(
                self.name,
                f"reads the layers from eagle_config in config.json, but finds {layers or 'none'} there",
                f"{export} writes the layers there",
            )

    def lookup(self, device: str) -> str:
        """See ServerKind. The model runner of GPUs has an n-gram speculator of its own."""
        return "ngram-gpu" if device == "cuda" else "prompt-lookup"

    def script(self, launch: Launch) -> tuple[str, str]:
        sampling = launch.sampling
        method = f"draft_sample_method = {sampling.method}, above temperature 0: {sampling.reason}"
        if launch.own_target:
            config = json.dumps({"draft_sample_method": sampling.method})
            serve = [
                f"# {method}",
                "# sh serve.sh [options of vllm serve]",
                SCRIPT_DIRECTORY,
                f'exec vllm serve "$here" --speculative-config {shlex.quote(config)} "$@"',
            ]
            return shell_script(launch, serve)
        config = _launched(launch, "@")
        about = ABOVE_ZERO if launch.kind == "prompt lookup" else method
        quoted = json.dumps(config).replace('"', '\\"').replace("@", "$here")
        lines = [
            f"# {about}",
            "# sh serve.sh [options of vllm serve]; the draft runs on the target's devices",
            SCRIPT_DIRECTORY,
            f'exec vllm serve {shlex.quote(launch.target)} --speculative-config "{quoted}" "$@"',
        ]
        return shell_script(launch, lines)

    def options(self, launch: Launch, draft: Path) -> list[object]:
        if launch.own_target:
            return []
        return ["--speculative-config", json.dumps(_launched(launch, str(draft)))]

    def command(self, program: Path, trial: ServerTrial) -> list[object]:
        options = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
        if trial.own_target:  # vLLM adds this to the settings in the head's config.json
            options += ["--speculative-config", json.dumps({"draft_sample_method": trial.method})]
            return [program.absolute(), "serve", trial.draft, *options]
        draft = str(trial.draft.absolute())
        config = speculative_config(draft, trial.k, trial.kind, trial.method)
        options += ["--speculative-config", json.dumps(config)]
        return [program.absolute(), "serve", trial.target, *options]

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        # every setting is sent, because vLLM takes missing settings from the model's generation_config.json
        body: dict[str, Any] = asdict(sampling) | NO_PENALTIES
        del body["filters"]  # vLLM's own order
        body |= {"prompt": prompt, "return_token_ids": True}
        if stops := body.pop("stop_token_ids"):
            body["stop_token_ids"] = list(stops)
        if k is not None:
            body |= {"logprobs": k, "return_tokens_as_token_ids": True}
        return body

    def completion(self, prompt: list[int], answer: Answer, k: int) -> ServedCompletion:
        logprobs = answer["choices"][0]["logprobs"]
        tops = []
        for tokens in logprobs["top_logprobs"] if k else []:
            row = [(int(name.removeprefix(TOKEN_PREFIX)), value) for name, value in tokens.items()]
            tops.append(kinds.top_k(row, k))
        return kinds.completion(prompt, self.written(answer), logprobs["token_logprobs"], tops)

    def written(self, answer: Answer) -> tuple[list[int], Any]:
        choice = answer["choices"][0]
        return choice["token_ids"], choice["finish_reason"]

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        return {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        rows = [{int(i): entry["logprob"] for i, entry in row.items()} for row in entries]
        actual = [row[i] for row, i in zip(rows, ids[1:], strict=True)]
        return kinds.prompt_logprobs([kinds.top_k([*row.items()], k) for row in rows], actual)


def _launched(launch: Launch, draft: str) -> dict[str, object]:
    """Return the speculative_config of a launch. draft: Directory of the draft."""
    method = launch.sampling.method
    return speculative_config(draft, launch.k, launch.kind, method, heterogeneous=launch.heterogeneous)


def speculative_config(
    draft: str,
    k: int,
    kind: DraftKind,
    sample_method: SampleMethod = "greedy",
    *,
    heterogeneous: bool = False,
) -> dict[str, object]:
    """Return the value of vLLM's --speculative-config, before it is written as JSON.

    Args:
        draft: Directory or name of the draft. Ignored for prompt lookup.
        k: Number of tokens drafted per step.
        sample_method: How the draft samples. Ignored for prompt lookup.
        heterogeneous: Whether draft and target have different vocabularies.
    """
    if kind == "prompt lookup":
        window = {"prompt_lookup_max": PROMPT_LOOKUP_MAX, "prompt_lookup_min": 1}
        return {"method": "ngram", "num_speculative_tokens": k, **window}
    method = "eagle3" if kind == "EAGLE-3 head" else "draft_model"
    config: dict[str, object] = {"method": method, "model": draft, "num_speculative_tokens": k}
    if heterogeneous:
        config["use_heterogeneous_vocab"] = True
    if kind == "parallel draft":
        config["parallel_drafting"] = True
    return config | {"draft_sample_method": sample_method}


def _splits(shape: "Shape", devices: int) -> bool:
    # if there are fewer kv heads than devices, vLLM repeats them
    kv = shape.kv_heads % devices == 0 or devices % shape.kv_heads == 0
    return shape.heads % devices == 0 and kv and shape.ffn % devices == 0
