"""Run by a Python that has llama-cpp-python, not by ours: asks on stdin, answers on stdout, both JSON.

quantize: [from, to, type] makes a file of one of llama.cpp's own types.  model, rows: the most probable next token
behind every token of each row.  texts: their ids.
"""

import json
import sys

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def quantize(source: str, out: str, kind: str) -> None:
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}"), 1
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), how):
        raise RuntimeError(f"llama.cpp could not quantise {source} to {kind}")


def most_probable(model: llama_cpp.Llama, row: list[int]) -> list[int]:
    model.reset()
    model.eval(row)
    return np.asarray(model.scores[: len(row)]).argmax(-1).tolist()


def main() -> None:
    asked = json.load(sys.stdin)
    if "quantize" in asked:
        quantize(*asked["quantize"])
    longest = max(map(len, asked["rows"]), default=1)
    model = llama_cpp.Llama(
        asked["model"], n_ctx=max(64, longest), n_batch=max(64, longest), n_threads=1, n_threads_batch=1,
        logits_all=True, verbose=False, n_gpu_layers=0,
    )  # fmt: skip
    ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in asked["texts"]]
    best = [most_probable(model, row) for row in asked["rows"]]
    json.dump({"best": best, "ids": ids, "version": llama_cpp.__version__}, sys.stdout)


if __name__ == "__main__":
    main()
