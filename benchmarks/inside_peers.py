"""Run by a peer's own Python, not by ours: one pair decoded greedily, asked on stdin, answered on stdout, both JSON.

Asked: peer, target, draft (None: plain), k, prompts in token ids, new_tokens, dtype. The first prompt warms up.
Answered: CPU seconds of the others, their tokens, and tokens per target pass where the peer tells its passes.
"""

import itertools
import json
import sys
import time


def llama_cpp(asked: dict) -> tuple[dict, str]:
    """Through llama-cpp-python: the draft is a second model behind its LlamaDraftModel."""
    import llama_cpp  # type: ignore[import-not-found]
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel  # type: ignore[import-not-found]

    def opened(path: str, **options: object) -> llama_cpp.Llama:
        return llama_cpp.Llama(
            path, n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=asked["draft"] is not None, verbose=False,
            n_gpu_layers=0, **options,
        )  # fmt: skip

    class Second(LlamaDraftModel):
        def __init__(self, path: str) -> None:
            self.model = opened(path)

        def __call__(self, input_ids: np.ndarray, /, **_: object) -> np.ndarray:
            drafted = itertools.islice(self.model.generate(input_ids.tolist(), temp=0.0), asked["k"])
            return np.array(list(drafted), dtype=np.intc)

    model = opened(asked["target"], draft_model=Second(asked["draft"]) if asked["draft"] else None)
    passes = [0]
    evaluate = model.eval

    def counted(tokens: list[int]) -> None:
        passes[0] += 1
        evaluate(tokens)

    model.eval = counted

    def decode(prompt: list[int]) -> list[int]:
        return list(itertools.islice(model.generate(prompt, temp=0.0), asked["new_tokens"]))

    decode(asked["prompts"][0])
    passes[0] = 0
    answer = timed(decode, asked["prompts"][1:])
    prompts = len(asked["prompts"]) - 1
    tokens = sum(map(len, answer["texts"]))
    return answer | {"tokens_per_pass": (tokens - prompts) / (passes[0] - prompts)}, llama_cpp.__version__


def vllm(asked: dict) -> tuple[dict, str]:
    import vllm as engine  # type: ignore[import-not-found]

    speculative = asked["draft"] and {
        "method": "draft_model",
        "model": asked["draft"],
        "num_speculative_tokens": asked["k"],
    }
    model = engine.LLM(
        asked["target"], dtype=asked["dtype"], max_model_len=512, max_num_seqs=1, enforce_eager=True,
        enable_prefix_caching=False, disable_log_stats=False, speculative_config=speculative,
    )  # fmt: skip
    how = engine.SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False)

    def decode(prompt: list[int]) -> list[int]:
        return list(model.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0].outputs[0].token_ids)

    def counters() -> tuple[int, int]:
        found = {m.name: m.value for m in model.get_metrics() if hasattr(m, "value")}
        return found.get("vllm:spec_decode_num_drafts", 0), found.get("vllm:spec_decode_num_accepted_tokens", 0)

    decode(asked["prompts"][0])
    before = counters()
    answer = timed(decode, asked["prompts"][1:])
    drafts, accepted = (b - a for a, b in zip(before, counters(), strict=True))
    return answer | {"tokens_per_pass": 1 + accepted / drafts if drafts else 1.0}, engine.__version__


def timed(decode, prompts: list[list[int]]) -> dict:
    began, wall = time.process_time(), time.perf_counter()
    texts = [decode(prompt) for prompt in prompts]
    return {"seconds": time.process_time() - began, "wall_seconds": time.perf_counter() - wall, "texts": texts}


def main() -> None:
    asked, out = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr  # peers print
    answer, version = {"llama.cpp": llama_cpp, "vllm": vllm}[asked["peer"]](asked)
    json.dump(answer | {"version": version}, out)


if __name__ == "__main__":
    main()
