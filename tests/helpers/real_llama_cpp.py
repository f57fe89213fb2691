"""A real llama.cpp, for tests with the marker llamacpp: the llama-server that DRAFTLAB_TEST_LLAMA_SERVER names."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from draftlab.exporting.verify import running
from draftlab.servers.client import Server


def llama_server() -> str:
    """Return the path of llama-server, or skip the test."""
    program = os.environ.get("DRAFTLAB_TEST_LLAMA_SERVER")
    if program is None:
        pytest.skip("DRAFTLAB_TEST_LLAMA_SERVER does not name a llama-server")
    return program


def in_float32(file: Path, context: int) -> AbstractContextManager[tuple[Server, object]]:
    """Run a GGUF file with one slot, a cache in float32 and attention in its plain form."""
    options = ["--threads", 1, "-np", 1, "-c", context, "--flash-attn", "off"]
    caches = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    return running([llama_server(), "--model", file, *options, *caches])


def log_probabilities(server: Server, ids: list[int], vocab: int, letter: int) -> torch.Tensor:
    """Return the log-probabilities [V] after a text.

    letter: Id of a token that is a whole character, because no list is returned for a part of a character.
    """
    body = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": vocab,
        "temperature": 1.0,
        "cache_prompt": False,
        "logit_bias": [[letter, 200.0]],
    }
    answer = server.http.json("POST", "/completion", body)
    found = torch.full((vocab,), torch.nan)
    for top in answer["completion_probabilities"][0]["top_logprobs"]:
        found[top["id"]] = top["logprob"]
    return found


def tokenize(server: Server, text: str) -> list[int]:
    asked = {"content": text, "add_special": False, "parse_special": True}
    return server.http.json("POST", "/tokenize", asked)["tokens"]
