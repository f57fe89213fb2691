"""llama.cpp's C++ server from the wheel xllamacpp, with the options of llama-server that draftlab uses.

    python3 -m venv llama && llama/bin/pip install xllamacpp
    llama/bin/python examples/llama_server.py --model TARGET.gguf -np 1 --port 8080 --metrics

The wheel has the server as a Python class, and no program llama-server. Unknown options are refused.
"""

import argparse
import os
import signal

import xllamacpp as x  # pyright: ignore[reportMissingImports]

SPEC, FLASH = "COMMON_SPECULATIVE_TYPE_", "LLAMA_FLASH_ATTN_TYPE_"
FLASH_VALUES = {"off": "DISABLED", "on": "ENABLED", "auto": "AUTO"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", "-m", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--api-key", default=os.environ.get("LLAMA_API_KEY"))
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--ctx-size", "-c", type=int)
    parser.add_argument("--parallel", "-np", type=int, help="default: four slots that share a cache")
    parser.add_argument("--threads", "-t", type=int)
    parser.add_argument("--cache-ram", type=int)
    parser.add_argument("--flash-attn", choices=FLASH_VALUES)
    for name in ("--cache-type-k", "--cache-type-v", "--spec-draft-type-k", "--spec-draft-type-v"):
        parser.add_argument(name, choices=("f32", "f16", "bf16", "q8_0"))
    parser.add_argument("--spec-type", help="draft-simple, draft-eagle3, ngram-simple, ...")
    parser.add_argument("--spec-draft-model", "--model-draft", "-md")
    parser.add_argument("--spec-draft-n-max", type=int)
    parser.add_argument("--spec-draft-p-min", type=float)
    parser.add_argument("--spec-ngram-simple-size-n", type=int)
    parser.add_argument("--spec-ngram-simple-size-m", type=int)
    server = x.Server(params(parser.parse_args()))
    print("listening", server.listening_address, flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    while True:
        signal.pause()


def params(options: argparse.Namespace) -> x.CommonParams:
    common = x.CommonParams()
    speculative, draft = common.speculative, common.speculative.draft
    common.model.path, common.hostnames, common.port = options.model, [options.host], options.port
    common.endpoint_metrics, common.endpoint_slots = options.metrics, True
    common.use_jinja, common.n_threads_http = True, 16
    common.n_parallel = options.parallel or 4
    common.kv_unified = options.parallel is None
    if options.api_key:
        common.api_keys = [options.api_key]
    if options.threads:
        for part in (
            common.cpuparams,
            common.cpuparams_batch,
            draft.cpuparams,
            draft.cpuparams_batch,
        ):
            part.n_threads = options.threads
    if options.flash_attn:
        name = FLASH + FLASH_VALUES[options.flash_attn]
        common.flash_attn_type = getattr(x.llama_flash_attn_type, name)
    if options.spec_type:
        name = SPEC + options.spec_type.upper().replace("-", "_")
        speculative.types = [getattr(x.common_speculative_type, name)]
    if options.spec_draft_model:
        draft.mparams.path = options.spec_draft_model
    ngram = speculative.ngram_simple
    for part, field, value in (
        (common, "n_ctx", options.ctx_size),
        (common, "cache_ram_mib", options.cache_ram),
        (common, "cache_type_k", tensor_type(options.cache_type_k)),
        (common, "cache_type_v", tensor_type(options.cache_type_v)),
        (draft, "cache_type_k", tensor_type(options.spec_draft_type_k)),
        (draft, "cache_type_v", tensor_type(options.spec_draft_type_v)),
        (draft, "n_max", options.spec_draft_n_max),
        (draft, "p_min", options.spec_draft_p_min),
        (ngram, "size_n", options.spec_ngram_simple_size_n),
        (ngram, "size_m", options.spec_ngram_simple_size_m),
    ):
        if value is not None:
            setattr(part, field, value)
    return common


def tensor_type(name: str | None) -> object:
    return None if name is None else getattr(x.ggml_type, f"GGML_TYPE_{name.upper()}")


if __name__ == "__main__":
    main()
