"""Decode greedily in another engine, transformers or vLLM, with that engine's Python. JSON on stdin and stdout.

The request on stdin has peer (the engine), way (plain, draft, ngram), target, draft, k, prompts as token ids,
new_tokens, eos, context and dtype. The first prompt is a warm-up. The answer on stdout has the result of timed() for
all other prompts, and the version of the engine.
"""

import json
import sys
import time
from typing import Any

NGRAM = 3  # longest n-gram to look up


def transformers(asked: dict) -> tuple[dict, str]:
    """Time plain, assisted or prompt-lookup generation of transformers, with a constant number of drafted tokens."""
    import torch
    import transformers as library

    torch.set_num_threads(1)
    dtype = getattr(torch, asked["dtype"])

    def opened(path: str) -> Any:
        return library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    model: Any = opened(asked["target"])
    options: dict[str, object] = {}
    if asked["way"] == "draft":
        assistant = opened(asked["draft"])
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = (
            asked["k"],
            "constant",
        )
        settings.assistant_confidence_threshold = 0.0
        options = {"assistant_model": assistant}
    if asked["way"] == "ngram":
        options = {"prompt_lookup_num_tokens": asked["k"], "max_matching_ngram_size": NGRAM}
    # a prefill is left out of the count only in plain decoding, as assisted generation drafts before its first pass
    counted, prefills = ([0, 0], int(asked["way"] == "plain"))

    def count(*_: object) -> None:
        counted[1] += 1

    model.register_forward_pre_hook(count)

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=asked["eos"],
            pad_token_id=asked["eos"][0],
            **options,
        )
        tokens = written[0, len(prompt) :].tolist()
        counted[0] += len(tokens) - prefills
        counted[1] -= prefills
        return tokens

    with torch.inference_mode():
        return timed(decode, asked, counted), library.__version__


def vllm(asked: dict) -> tuple[dict, str]:
    import vllm as engine  # type: ignore[import-not-found]

    speculative = {
        "plain": None,
        "draft": {"method": "draft_model", "model": asked["draft"], "num_speculative_tokens": asked["k"]},
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": asked["k"],
            "prompt_lookup_max": NGRAM,
            "prompt_lookup_min": 1,
        },
    }[asked["way"]]
    model = engine.LLM(
        asked["target"],
        dtype=asked["dtype"],
        max_model_len=asked["context"],
        max_num_seqs=1,
        enforce_eager=False,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        how = engine.SamplingParams(temperature=0, max_tokens=new_tokens, stop_token_ids=asked["eos"], detokenize=False)
        before = drafted()
        tokens = list(model.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0].outputs[0].token_ids)
        drafts, accepted = (now - then for now, then in zip(drafted(), before, strict=True))
        counted[0] += len(tokens) - 1
        # passes of a lookup are counted by tokens, because a lookup without a match drafts nothing
        counted[1] += drafts if asked["way"] == "draft" else len(tokens) - 1 - accepted
        return tokens

    def drafted() -> tuple[int, int]:
        found = {m.name: m.value for m in model.get_metrics() if hasattr(m, "value")}
        return found.get("vllm:spec_decode_num_drafts", 0), found.get("vllm:spec_decode_num_accepted_tokens", 0)

    counted = [0, 0]
    return timed(decode, asked, counted), engine.__version__


def timed(decode, asked: dict, counted: list[int], clock=time.process_time) -> dict:
    """Decode all prompts except the first, once for one token and once completely. Return a dict of lists, by prompt.

    prefill_seconds: CPU seconds for one token. seconds: CPU seconds for the complete answer. steps: Number of tokens
    after the prefill's token, and number of target passes for these tokens.

    counted: Both numbers, summed; decode adds to them.
    """
    decode(asked["prompts"][0], asked["new_tokens"])
    answer = {"prefill_seconds": [], "seconds": [], "wall_seconds": [], "texts": [], "steps": []}
    for prompt in asked["prompts"][1:]:
        began = clock()
        decode(prompt, 1)
        answer["prefill_seconds"].append(clock() - began)
    for prompt in asked["prompts"][1:]:
        before, began, wall = list(counted), clock(), time.perf_counter()
        answer["texts"].append(decode(prompt, asked["new_tokens"]))
        answer["seconds"].append(clock() - began)
        answer["wall_seconds"].append(time.perf_counter() - wall)
        answer["steps"].append([now - then for now, then in zip(counted, before, strict=True)])
    return answer


def main() -> None:
    asked, out = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr  # because the engines print to stdout, too
    peers = {"transformers": transformers, "vllm": vllm}
    answer, version = peers[asked["peer"]](asked)
    json.dump(answer | {"version": version}, out)


if __name__ == "__main__":
    main()
