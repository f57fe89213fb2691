"""SGLang 0.5.23: speculation with a draft model (its standalone worker) or an EAGLE-3 head, and requests to /generate.

SGLang reports the log-probabilities of generated tokens after temperature scaling, unless it was started with
SGLANG_RETURN_ORIGINAL_LOGPROB=1. Seeds need --enable-deterministic-inference.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from draftlab.config.server_rules import DecodingRule
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams
from draftlab.servers import kinds
from draftlab.servers.kinds import (
    ABOVE_ZERO,
    SCRIPT_DIRECTORY,
    Answer,
    Artifact,
    DraftedTokens,
    Finding,
    Launch,
    PromptLogprobs,
    ServedCompletion,
    ServedHead,
    ServerKind,
    check_head_dim,
    error,
    server,
    shell_script,
    unknown_architecture,
)
from draftlab.servers.vllm import NO_PENALTIES

FLASHINFER_HEADS = (64, 128, 256)
COLDEST = 1e-6  # SGLang decodes greedily at lower temperatures


@server("sglang")
class SGLang(ServerKind):
    heads = "loads the directory as it is, with --speculative-algorithm EAGLE3"
    head_parts = frozenset({"norm_before_fc", "fc_norm", "norm_output", "sliding_window"})
    # SGLang samples from the target and accepts drafted tokens that match, because both of its thresholds are 1
    rules: ClassVar[Mapping[str, DecodingRule]] = {
        "": DecodingRule(
            "match",
            draft=(),
            target=("temperature", "top_k", "top_p"),
            refused={"min_p": "SGLang ignores it where it verifies drafted tokens"},
            temperature=lambda sent: sent if sent >= COLDEST else 0.0,
        )
    }
    owned_by = "sglang"
    path = "/generate"
    about_path = "/server_info"

    def check_draft(self, artifact: Artifact) -> Iterator[Finding]:
        if artifact.shape is None:
            yield unknown_architecture(self.name, artifact)
        else:
            fix = "start the server with --attention-backend triton"
            yield from check_head_dim(self.name, artifact.shape.head_dim, FLASHINFER_HEADS, fix, "with flashinfer")

    def check_stored_head(self, artifact: Artifact, head: ServedHead) -> Iterator[Finding]:
        layers = (artifact.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        export = f"draftlab export --to {self.name}"
        if "speculators_model_type" in artifact.config:
            yield error(
                self.name,
                "does not read speculators' layout",
                f"{export} writes SpecForge's layout, which SGLang reads",
            )
        elif layers != [i - 1 for i in head.layer_ids]:
            text = f"reads the layers from eagle_config in config.json, but finds {layers or 'none'} there"
            yield error(self.name, text, f"{export} writes the layers there")

    def script(self, launch: Launch) -> tuple[str, str]:
        start = f"exec python -m sglang.launch_server --model-path {shlex.quote(launch.target)} \\"
        usage = "# sh serve.sh [options of sglang.launch_server]; untested"
        tokens = launch.k + 1
        algorithm = "EAGLE3" if launch.kind == "EAGLE-3 head" else "STANDALONE"
        options = f"--speculative-num-steps {launch.k} --speculative-eagle-topk 1"
        if launch.sliding_window is not None:  # SGLang does not read the window from config.json
            options += f" --speculative-draft-window-size {launch.sliding_window}"
        lines = [
            f"# {ABOVE_ZERO}; thresholds below 1 are lossy, and speculative_use_rejection_sampling stays off",
            usage,
            SCRIPT_DIRECTORY,
            start,
            f'    --speculative-algorithm {algorithm} --speculative-draft-model-path "$here" {options} '
            f'--speculative-num-draft-tokens {tokens} "$@"',
        ]
        return shell_script(launch, lines)

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        settings = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": list(sampling.stop_token_ids),
            **NO_PENALTIES,
        }
        logprobs = {} if k is None else {"return_logprob": True, "top_logprobs_num": k}
        return {"input_ids": prompt, "sampling_params": settings} | logprobs

    def completion(self, prompt: list[int], answer: Answer, k: int) -> ServedCompletion:
        meta = answer["meta_info"]
        if "spec_verify_ct" in meta and "output_token_logprobs" not in meta:  # sglang#10660
            raise DraftedTokens("the answer of a server that drafts lacks log-probabilities")
        tops = [_top_k(row, k) for row in (meta["output_top_logprobs"] if k else [])]
        logprobs = _logprobs_of(answer["output_ids"], meta["output_token_logprobs"])
        return kinds.completion(prompt, self.written(answer), logprobs, tops)

    def written(self, answer: Answer) -> tuple[list[int], Any]:
        return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]

    def counters(self, answer: Answer) -> Counters | None:
        meta = answer["meta_info"]
        if "spec_verify_ct" not in meta:
            return None
        histogram = meta["spec_correct_drafts_histogram"]  # steps by number of accepted tokens
        return Counters(
            num_drafts=meta["spec_verify_ct"],
            num_draft_tokens=meta["spec_num_proposed_drafts"],
            num_accepted_tokens_per_pos=[float(sum(histogram[i:])) for i in range(1, len(histogram))],
        )

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
        }

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        meta = answer["meta_info"]
        tops = [_top_k(row, k) for row in meta["input_top_logprobs"][1:]]
        return kinds.prompt_logprobs(tops, _logprobs_of(ids[1:], meta["input_token_logprobs"][1:]))


def _logprobs_of(ids: list[int], entries: list[list[Any]]) -> list[float]:
    """Return the log-probabilities of tokens. Raises ValueError: the entries are those of other tokens."""
    kinds.check_same_ids(ids, [token for _, token, _ in entries])
    return [value for value, _, _ in entries]


def _top_k(row: list[list[Any]], k: int) -> kinds.TopLogprobs:
    return kinds.top_k([(token, value) for value, token, _ in row], k)
