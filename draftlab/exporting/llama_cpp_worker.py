"""A worker for a Python that has llama-cpp-python: reads a JSON job on stdin, writes a JSON answer on stdout.

quantize: [from, to, type], converts a file to one of llama.cpp's own types. model, rows: returns the argmax after every
token of each row. texts: returns their token ids.
"""

import json
import sys

import llama_cpp  # type: ignore[import-not-found]  # runs in another environment, which has it
import numpy as np


def quantize(source: str, out: str, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}"), 1
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), params):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}")


def most_probable(model: llama_cpp.Llama, row: list[int]) -> list[int]:
    model.reset()
    model.eval(row)
    return np.asarray(model.scores[: len(row)]).argmax(-1).tolist()


def main() -> None:
    job = json.load(sys.stdin)
    if "quantize" in job:
        quantize(*job["quantize"])
    longest = max(map(len, job["rows"]), default=1)
    model = llama_cpp.Llama(
        job["model"], n_ctx=max(64, longest), n_batch=max(64, longest), n_threads=1, n_threads_batch=1,
        logits_all=True, verbose=False, n_gpu_layers=0,
    )  # fmt: skip
    ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in job["texts"]]
    best = [most_probable(model, row) for row in job["rows"]]
    json.dump({"best": best, "ids": ids, "version": llama_cpp.__version__}, sys.stdout)


if __name__ == "__main__":
    main()
