"""A real llama.cpp computes the logits and tokens of transformers for each checkpoint of the zoo that it knows.

DRAFTLAB_TEST_LLAMA_SERVER: llama.cpp's llama-server.
"""

import os

import pytest
import torch
from gguf_files import contents
from transformers import AutoModelForCausalLM

from draftlab.exporting import gguf
from draftlab.exporting.verify import running
from draftlab.model import checkpoint

from .build import build
from .facts import YES, zoo

# checkpoints in .bin files are imported first, to the layout of another one here
KNOWN = [n for n, facts in zoo().items() if facts.writes_gguf == YES and "bin" not in facts.files]


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", KNOWN)
def test_a_real_server_gives_the_logits_and_tokens_of_transformers(name, tmp_path):
    program = os.environ.get("DRAFTLAB_TEST_LLAMA_SERVER")
    if program is None:
        pytest.skip("DRAFTLAB_TEST_LLAMA_SERVER does not name a llama-server")
    folder, file = build(zoo()[name], tmp_path / "M"), tmp_path / "a.gguf"
    tokenizer = gguf.write(folder, file, "f32").tokenizer
    fields, _ = contents(file)
    context = int(str(fields[f"{fields['general.architecture']}.context_length"]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 250, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    letter = checkpoint.load_tokenizer(folder).convert_tokens_to_ids("a")
    options = ["--threads", 1, "-np", 1, "-c", 256, "--flash-attn", "off"]
    caches = ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    with running([program, "--model", file, *options, *caches]) as (client, _):
        for length in {8, min(100, context), min(250, context)}:
            body = {
                "prompt": ids[:length], "n_predict": 1, "n_probs": len(tokenizer.tokens), "temperature": 1.0,
                "cache_prompt": False, "logit_bias": [[letter, 200.0]],  # no list comes for a part of a character
            }  # fmt: skip
            answer = client.http.json("POST", "/completion", body)
            with torch.no_grad():
                wanted = model(torch.tensor([ids[:length]])).logits[0, -1].log_softmax(-1)
            found = torch.full_like(wanted, torch.nan)
            for top in answer["completion_probabilities"][0]["top_logprobs"]:
                found[top["id"]] = top["logprob"]
            torch.testing.assert_close(found, wanted, atol=0.005, rtol=0)
        tokenized = [
            client.http.json(
                "POST", "/tokenize", {"content": text, "add_special": False, "parse_special": True}
            )["tokens"]
            for text in tokenizer.probes.texts
        ]
    # the share that an export prints is measured here; what differs there differs in the server
    equal = [a == b for a, b in zip(tokenized, tokenizer.probes.ids, strict=True)]
    assert equal == tokenizer.equal
