"""Requests to each kind of server in token ids, and the parsing of its answers. No torch.

n tokens, k top tokens. An answer that lacks something raises KeyError, TypeError and the like.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftlab.errors import UserError
from draftlab.results.decoding import Counters
from draftlab.sampling import SamplingParams

TOKEN_PREFIX = "token_id:"  # vLLM's spelling of a token with return_tokens_as_token_ids
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

LARGEST_ID = 1 << 24
ROUNDING = 1e-3  # nats that rounding may put a log-probability above 0

Answer = Any  # parsed JSON
TopLogprobs = tuple[list[int], list[float]]  # k ids and log-probabilities, the most probable first


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The n tokens that a server generated after a prompt, eos included, with their log-probabilities."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]  # [n][k], the most probable first; [] for k = 0
    top_logprobs: list[list[float]]
    finish_reason: str | None  # stop: eos; length: max_tokens; None: read from a log, which does not tell

    def checked(self, max_tokens: int, k: int) -> "Completion":
        """Raises ValueError: other values than were asked for, or some that are no ids or not finite."""
        checked_ids(self.ids, max_tokens)
        _check_values(self.logprobs, len(self.ids))
        _check_lists(self.top_ids, self.top_logprobs, len(self.ids) if k else 0)
        return self

    def as_json(self) -> str:
        """Return one line of a traffic file (docs/formats.md)."""
        fields = asdict(self)
        del fields["finish_reason"]
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities that a server gives to the tokens of a text after the first, and its k top tokens there."""

    top_ids: list[list[int]]  # [n][k], the most probable first
    top_logprobs: list[list[float]]
    logprobs: list[float]

    def checked(self, n: int, k: int) -> "PromptLogprobs":
        """Raises ValueError: other values than those of n tokens, or some that are no ids or not finite."""
        _check_values(self.logprobs, n)
        _check_lists(self.top_ids, self.top_logprobs, n if k else 0)
        return self


class Adapter(ABC):
    """The protocol of one kind of server."""

    path: str  # of completions and prompt log-probabilities
    about_path: str  # of a page with the version
    has_prompt_logprobs = True

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> tuple[str, int | None]:
        """Return version and longest sequence, from the page at about_path and the model's card in /v1/models."""
        return page.get("version", "unknown"), card.get("max_model_len")

    @abstractmethod
    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        """Return the body of a request. k: top tokens per position; None asks for ids alone, at the least cost."""

    @abstractmethod
    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion: ...

    @abstractmethod
    def ids(self, answer: Answer) -> list[int]:
        """Return the generated tokens, eos included."""

    def counters(self, answer: Answer) -> Counters | None:
        """Return the speculative counters of this answer, if it has its own."""
        return None

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        raise NotImplementedError

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        raise NotImplementedError

    def tokenize_request(self, text: str) -> dict[str, Any]:
        return {"prompt": text, "add_special_tokens": False}


class VLLM(Adapter):
    """vLLM's /v1/completions (0.32), and other servers with the same extensions."""

    path = "/v1/completions"
    about_path = "/version"

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        # every setting is sent: those left out would come from the model's generation_config.json
        settings = {name: value for name, value in asdict(sampling).items() if name != "stop_token_ids"}
        stops = {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
        logprobs = {} if k is None else {"logprobs": k, "return_tokens_as_token_ids": True}
        return settings | stops | NO_PENALTIES | logprobs | {"prompt": prompt, "return_token_ids": True}

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion:
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        tops = [
            _top_k(((int(name.removeprefix(TOKEN_PREFIX)), value) for name, value in tokens.items()), k)
            for tokens in (logprobs["top_logprobs"] if k else [])
        ]
        return _completion(prompt, choice["token_ids"], logprobs["token_logprobs"], tops, choice["finish_reason"])

    def ids(self, answer: Answer) -> list[int]:
        return answer["choices"][0]["token_ids"]

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        return {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        rows = [{int(i): entry["logprob"] for i, entry in row.items()} for row in entries]
        actual = [row[i] for row, i in zip(rows, ids[1:], strict=True)]
        return _prompt_logprobs([_top_k(row.items(), k) for row in rows], actual)


class SGLang(Adapter):
    """SGLang's /generate (0.5.23).

    Log-probabilities of generated tokens are after temperature unless it runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1;
    seeds need --enable-deterministic-inference.
    """

    path = "/generate"
    about_path = "/server_info"

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        settings = {
            "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": sampling.min_p, "sampling_seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos, "stop_token_ids": list(sampling.stop_token_ids), **NO_PENALTIES,
        }  # fmt: skip
        logprobs = {} if k is None else {"return_logprob": True, "top_logprobs_num": k}
        return {"input_ids": prompt, "sampling_params": settings} | logprobs

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion:
        meta = answer["meta_info"]
        tops = [_top_k(((i, value) for value, i, _ in row), k) for row in (meta["output_top_logprobs"] if k else [])]
        logprobs = [value for value, _, _ in meta["output_token_logprobs"]]
        return _completion(prompt, answer["output_ids"], logprobs, tops, meta["finish_reason"]["type"])

    def ids(self, answer: Answer) -> list[int]:
        return answer["output_ids"]

    def counters(self, answer: Answer) -> Counters | None:
        meta = answer["meta_info"]
        if "spec_verify_ct" not in meta:
            return None
        histogram = meta["spec_correct_drafts_histogram"]  # steps by number of accepted tokens
        _check_values([*histogram, meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]], len(histogram) + 2, 0)
        return Counters(
            num_drafts=meta["spec_verify_ct"],
            num_draft_tokens=meta["spec_num_proposed_drafts"],
            num_accepted_tokens_per_pos=[float(sum(histogram[i:])) for i in range(1, len(histogram))],
        )

    def prompt_logprobs_request(self, ids: list[int], k: int) -> dict[str, Any]:
        logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k}
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}} | logprobs

    def prompt_logprobs(self, ids: list[int], answer: Answer, k: int) -> PromptLogprobs:
        meta = answer["meta_info"]
        tops = [_top_k(((i, value) for value, i, _ in row), k) for row in meta["input_top_logprobs"][1:]]
        return _prompt_logprobs(tops, [value for value, _, _ in meta["input_token_logprobs"][1:]])


class LlamaCpp(Adapter):
    """llama.cpp's /completion, which has no prompt log-probabilities. Its log-probabilities are before all samplers."""

    path = "/completion"
    about_path = "/props"
    has_prompt_logprobs = False

    def about(self, page: Mapping[str, Any], card: Mapping[str, Any]) -> tuple[str, int | None]:
        return page.get("build_info", "unknown"), page.get("default_generation_settings", {}).get("n_ctx")

    def completion_request(self, prompt: list[int], sampling: SamplingParams, k: int | None) -> dict[str, Any]:
        if sampling.stop_token_ids:
            raise UserError("llama.cpp's server stops at its model's own eos, not at stop_token_ids")
        return {
            "prompt": prompt, "n_predict": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p, "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos, "samplers": ["top_k", "top_p", "min_p", "temperature"],
            "cache_prompt": False, "n_probs": 0 if k is None else max(1, k), "return_tokens": True,
        }  # fmt: skip

    def completion(self, prompt: list[int], answer: Answer, k: int) -> Completion:
        tokens = answer["completion_probabilities"]
        tops = [_top_k(((t["id"], t["logprob"]) for t in token["top_logprobs"]), k) for token in tokens if k]
        reason = {"eos": "stop", "limit": "length"}[answer["stop_type"]]
        return _completion(prompt, answer["tokens"], [token["logprob"] for token in tokens], tops, reason)

    def ids(self, answer: Answer) -> list[int]:
        return answer["tokens"]

    def tokenize_request(self, text: str) -> dict[str, Any]:
        return {"content": text, "add_special": False}


# by owned_by in /v1/models; openai: all others
ADAPTERS: dict[str, Adapter] = {"vllm": VLLM(), "sglang": SGLang(), "openai": VLLM(), "llamacpp": LlamaCpp()}


def checked_ids(ids: Any, most: int) -> list[int]:
    """Return a list of at most so many token ids. Raises ValueError: it is none."""
    if not isinstance(ids, list) or len(ids) > most:
        raise ValueError(
            f"{len(ids) if isinstance(ids, list) else type(ids).__name__} instead of {most} tokens at most"
        )
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i <= LARGEST_ID), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} as a token id")
    return ids


def _check_values(values: Any, n: int, lowest: float = -math.inf) -> None:
    """Raises ValueError: not a list of n finite numbers from lowest on."""
    if not isinstance(values, list) or len(values) != n:
        raise ValueError(f"{len(values) if isinstance(values, list) else type(values).__name__} numbers instead of {n}")
    wrong = [v for v in values if type(v) not in (int, float) or not math.isfinite(v) or v < lowest]
    if wrong:
        raise ValueError(f"{wrong[0]!r} instead of a finite number")


def _check_lists(ids: list[list[int]], values: list[list[float]], n: int) -> None:
    """Raises ValueError: not n lists of different ids with their log-probabilities."""
    if len(ids) != n or len(values) != n:
        raise ValueError(f"{len(ids)} lists of tokens instead of {n}")
    for row, logprobs in zip(ids, values, strict=True):
        _check_values(logprobs, len(checked_ids(row, len(logprobs))))
        if len(set(row)) < len(row):
            raise ValueError("a token twice in one list")


def _top_k(entries: Iterable[tuple[int, float]], k: int) -> TopLogprobs:
    """Return the k most probable; servers list the actual token too, whatever its rank."""
    top = sorted(entries, key=lambda entry: -entry[1])[:k]
    if len(top) < k:
        raise ValueError(f"{len(top)} top tokens instead of {k}")
    return [i for i, _ in top], [value for _, value in top]


def _completion(
    prompt: list[int], ids: list[int], logprobs: list[float], tops: list[TopLogprobs], reason: str
) -> Completion:
    if len(logprobs) != len(ids) or (tops and len(tops) != len(ids)):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probabilities and {len(tops)} lists")
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    return Completion(
        prompt_ids=prompt, ids=ids, logprobs=logprobs, top_ids=[ids for ids, _ in tops],
        top_logprobs=[values for _, values in tops], finish_reason=reason,
    )  # fmt: skip


def _prompt_logprobs(tops: list[TopLogprobs], actual: list[float]) -> PromptLogprobs:
    return PromptLogprobs([ids for ids, _ in tops], [values for _, values in tops], actual)
