"""How each kind of server is asked in token ids, and where its answers hold what was asked for. No torch.

n tokens, k listed ones. What cannot be taken out of an answer raises KeyError, TypeError and the like.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from draftlab.results.score import Counters
from draftlab.sampling import SamplingParams

TOKEN_PREFIX = "token_id:"  # how vLLM writes a token when asked for ids

Answer = Any  # JSON of somebody else


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a server wrote after a prompt: n ids, eos included, each with its log-probability and the k likeliest."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]  # [n][k], the most probable first; [] where none were asked for
    top_logprobs: list[list[float]]
    finish_reason: str | None  # stop: eos; length: as many tokens as were asked for; None: a log does not say

    def as_json(self) -> str:
        """One line of a traffic file (docs/formats.md)."""
        fields = asdict(self)
        del fields["finish_reason"]
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What a server thinks of the tokens of a text but the first: their log-probabilities and the k likeliest."""

    top_ids: list[list[int]]  # [n][k], the most probable first
    top_logprobs: list[list[float]]
    logprobs: list[float]


class Adapter(Protocol):
    """How one kind of server says what it is and writes. path: where; about_path: of a page that tells its version."""

    path: str
    about_path: str

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> tuple[str, int | None]:
        """Version and longest sequence, from that page and the model's card among /v1/models."""
        ...

    def generate(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        """k None: token ids alone, which costs the server least."""
        ...

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion: ...

    def ids(self, answer: Answer) -> list[int]:
        """What was written, eos included."""
        ...

    def counters(self, answer: Answer) -> Counters | None:
        """Of this answer alone, where it holds them; None: nothing was drafted, or the metrics page has them."""
        ...

    def tokenize(self, text: str) -> dict[str, Any]: ...


class ScoringAdapter(Adapter, Protocol):
    """One that also scores text which it did not write, at the same path."""

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]: ...

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs: ...


class VLLM:
    """vLLM's /v1/completions (0.32), and whatever else takes the same extensions of it."""

    path = "/v1/completions"
    about_path = "/version"

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> tuple[str, int | None]:
        return page.get("version", "unknown"), card.get("max_model_len")

    def generate(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        # all of them said: what is left out comes from the model's generation_config.json
        fixed = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        asked = {} if k is None else {"logprobs": k, "return_tokens_as_token_ids": True}
        settings = asdict(sampling) | {"stop_token_ids": list(sampling.stop_token_ids)}
        if not sampling.stop_token_ids:
            del settings["stop_token_ids"]
        return settings | fixed | asked | {"prompt": prompt, "return_token_ids": True}

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion:
        choice = answer["choices"][0]
        found = choice["logprobs"]
        listed = [
            _likeliest(((int(name.removeprefix(TOKEN_PREFIX)), value) for name, value in tokens.items()), k)
            for tokens in (found["top_logprobs"] if k else [])
        ]
        return _completion(prompt, choice["token_ids"], found["token_logprobs"], listed, choice["finish_reason"])

    def ids(self, answer: Answer) -> list[int]:
        return answer["choices"][0]["token_ids"]

    def counters(self, answer: Answer) -> Counters | None:
        return None

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        return {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        found = answer["choices"][0]["prompt_logprobs"][1:]
        rows = [{int(i): entry["logprob"] for i, entry in row.items()} for row in found]
        came = [row[i] for row, i in zip(rows, ids[1:], strict=True)]
        return _prompt_logprobs([_likeliest(row.items(), k) for row in rows], came)

    def tokenize(self, text: str) -> dict[str, Any]:
        return {"prompt": text, "add_special_tokens": False}


class SGLang:
    """SGLang's own /generate (0.5.23). Log-probabilities of written tokens are after temperature unless it was started
    with SGLANG_RETURN_ORIGINAL_LOGPROB=1; seeds count with --enable-deterministic-inference only."""

    path = "/generate"
    about_path = "/server_info"

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> tuple[str, int | None]:
        return page.get("version", "unknown"), card.get("max_model_len")

    def generate(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        settings = {
            "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "sampling_seed": sampling.seed, "ignore_eos": sampling.ignore_eos,
            "min_p": sampling.min_p, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        asked = {} if k is None else {"return_logprob": True, "top_logprobs_num": k}
        return {"input_ids": prompt, "sampling_params": settings} | asked

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion:
        found = answer["meta_info"]
        tops = found["output_top_logprobs"] if k else []
        listed = [_likeliest(((i, value) for value, i, _ in row), k) for row in tops]
        logprobs = [value for value, _, _ in found["output_token_logprobs"]]
        return _completion(prompt, answer["output_ids"], logprobs, listed, found["finish_reason"]["type"])

    def ids(self, answer: Answer) -> list[int]:
        return answer["output_ids"]

    def counters(self, answer: Answer) -> Counters | None:
        found = answer["meta_info"]
        if "spec_verify_ct" not in found:
            return None
        histogram = found["spec_correct_drafts_histogram"]  # steps by accepted tokens
        accepted = [float(sum(histogram[i:])) for i in range(1, len(histogram))]
        return Counters(
            num_drafts=found["spec_verify_ct"],
            num_draft_tokens=found["spec_num_proposed_drafts"],
            num_accepted_tokens_per_pos=accepted,
        )

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k}
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}} | asked

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        found = answer["meta_info"]
        listed = [_likeliest(((i, value) for value, i, _ in row), k) for row in found["input_top_logprobs"][1:]]
        return _prompt_logprobs(listed, [value for value, _, _ in found["input_token_logprobs"][1:]])

    def tokenize(self, text: str) -> dict[str, Any]:
        return {"prompt": text, "add_special_tokens": False}


class LlamaCpp:
    """llama.cpp's own /completion, which does not score text. Log-probabilities are those before all samplers."""

    path = "/completion"
    about_path = "/props"

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> tuple[str, int | None]:
        return page.get("build_info", "unknown"), page.get("default_generation_settings", {}).get("n_ctx")

    def generate(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        return {
            "prompt": prompt, "n_predict": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos, "samplers": ["top_k", "top_p", "temperature"], "cache_prompt": False,
            "n_probs": 0 if k is None else max(1, k), "return_tokens": True,
        }  # fmt: skip

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion:
        found = answer["completion_probabilities"]
        listed = [_likeliest(((t["id"], t["logprob"]) for t in token["top_logprobs"]), k) for token in found if k]
        logprobs = [token["logprob"] for token in found]
        reason = {"eos": "stop", "limit": "length"}[answer["stop_type"]]
        return _completion(prompt, answer["tokens"], logprobs, listed, reason)

    def ids(self, answer: Answer) -> list[int]:
        return answer["tokens"]

    def counters(self, answer: Answer) -> Counters | None:
        return None

    def tokenize(self, text: str) -> dict[str, Any]:
        return {"content": text, "add_special": False}


SCORING_ADAPTERS: dict[str, ScoringAdapter] = {"vllm": VLLM(), "sglang": SGLang(), "openai": VLLM()}
ADAPTERS: dict[str, Adapter] = {
    **SCORING_ADAPTERS,
    "llamacpp": LlamaCpp(),
}  # by owner in /v1/models; openai: all others


def _likeliest(found: Iterable[tuple[int, float]], k: int) -> tuple[list[int], list[float]]:
    """ids and log-probabilities of the k most probable; servers add the token that came, wherever it ranks."""
    first = sorted(found, key=lambda entry: -entry[1])[:k]
    if len(first) < k:
        raise ValueError(f"{len(first)} tokens listed where {k} were asked for")
    return [i for i, _ in first], [value for _, value in first]


def _completion(
    prompt: list[int], ids: list[int], logprobs: list[float], listed: list[tuple[list[int], list[float]]], reason: str
) -> Completion:
    if len(logprobs) != len(ids) or (listed and len(listed) != len(ids)):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probabilities and {len(listed)} lists")
    if reason not in ("stop", "length"):
        raise ValueError(f"the text ended by {reason!r}")
    tops, values = [ids for ids, _ in listed], [values for _, values in listed]
    return Completion(
        prompt_ids=prompt, ids=ids, logprobs=logprobs, top_ids=tops, top_logprobs=values, finish_reason=reason
    )


def _prompt_logprobs(listed: list[tuple[list[int], list[float]]], came: list[float]) -> PromptLogprobs:
    return PromptLogprobs([ids for ids, _ in listed], [values for _, values in listed], came)
