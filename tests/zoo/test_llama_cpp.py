"""A real llama.cpp computes the logits and tokens of transformers for each checkpoint of the zoo that it knows."""

from functools import partial

import pytest
import torch
from helpers.gguf_files import contents
from helpers.real_llama_cpp import in_float32, llama_server, log_probabilities, tokenize
from transformers import AutoModelForCausalLM

from draftlab.exporting import gguf
from draftlab.model import checkpoint

from .build import build
from .facts import YES, zoo

# checkpoints in .bin files are imported first, to the layout of another one here
KNOWN = [n for n, facts in zoo().items() if facts.writes_gguf == YES and "bin" not in facts.files]


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", KNOWN)
def test_a_real_server_gives_the_logits_and_tokens_of_transformers(name, tmp_path):
    llama_server()
    folder, file = build(zoo()[name], tmp_path / "M"), tmp_path / "a.gguf"
    tokenizer = gguf.write(folder, file, "f32").tokenizer
    fields, _ = contents(file)
    context = int(str(fields[f"{fields['general.architecture']}.context_length"]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 250, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    letter = checkpoint.load_tokenizer(folder).convert_tokens_to_ids("a")
    with in_float32(file, 256) as (client, _):
        for length in {8, min(100, context), min(250, context)}:
            with torch.no_grad():
                wanted = model(torch.tensor([ids[:length]])).logits[0, -1].log_softmax(-1)
            found = log_probabilities(client, ids[:length], len(tokenizer.tokens), letter)
            # small random models say nearly the same of all tokens
            torch.testing.assert_close(found, wanted, atol=0.002 * float(wanted.std()), rtol=0)
        # the share that an export prints is that of the server
        assert tokenizer.probes.equal(partial(tokenize, client)) == tokenizer.equal
