"""Public chat templates, rendered by transformers."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftlab.data.text import Message

TEMPLATES = Path(__file__).parents[1] / "files" / "chat_templates"
LINES = ["\n\n\nassistant\n\n yes, it is  so\n", "user: yes yes\n\n\n it is  two  lines\n\n"] * 9
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
# for each family: special tokens, with eos first, other tokens at which it stops, and what the model writes
FAMILIES: dict[str, tuple[Sequence[str], Sequence[str], Callable[[str], str]]] = {
    "chatml": (CHATML, (), lambda said: said + "<|im_end|>"),
    "smollm2": (CHATML, (), lambda said: said + "<|im_end|>"),
    "smollm3": (CHATML, (), lambda said: said + "<|im_end|>"),
    "qwen2_5": (CHATML, ("<|endoftext|>",), lambda said: said + "<|im_end|>"),
    "qwen3": (CHATML, ("<|endoftext|>",), lambda said: f"<think>\n\n</think>\n\n{said}<|im_end|>"),
    "llama2": (("</s>",), (), lambda said: f" {said.strip()} </s>"),
    "llama3": (
        ("<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        ("<|eot_id|>",),
        lambda said: said.strip() + "<|eot_id|>",
    ),
    "llama4": (
        ("<|end_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
        ("<|eot|>",),
        lambda said: said + "<|eot|>",
    ),
    "glm4": (
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|user|>", "<|observation|>"),
        lambda said: said + "<|user|>",
    ),
    "deepseek_v3": (
        ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        (),
        lambda said: said + "<｜end▁of▁sentence｜>",
    ),
    "deepseek_r1": (
        ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        (),
        lambda said: said + "<｜end▁of▁sentence｜>",
    ),
    "gemma2": (
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        lambda said: said.strip() + "<end_of_turn>",
    ),
    "gemma3": (
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        lambda said: said.strip() + "<end_of_turn>",
    ),
    "mistral_v1": (("</s>",), (), lambda said: f" {said}</s>"),
    "mistral_v3": (("</s>", "[INST]", "[/INST]"), (), lambda said: f" {said.strip()}</s>"),
    "mistral_v7": (("</s>", "[INST]", "[/INST]"), (), lambda said: said + "</s>"),
    "phi3": (
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"),
        ("<|end|>", "<|assistant|>"),
        lambda said: said + "<|end|>",
    ),
    "phi4": (
        ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        ("<|im_end|>",),
        lambda said: said + "<|im_end|>",
    ),
    "granite": (
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        (),
        lambda said: said + "<|end_of_text|>",
    ),
    "command_r": (
        ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        (),
        lambda said: said.strip() + "<|END_OF_TURN_TOKEN|>",
    ),
    "olmo2": (("<|endoftext|>",), (), lambda said: said + "<|endoftext|>"),
    "gpt_oss": (
        ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        ("<|call|>",),
        lambda said: f"<|channel|>final<|message|>{said}<|return|>",
    ),
    "falcon": (("<|endoftext|>",), (), lambda said: f" {said}"),  # its template has no stop token
    "falcon3": (("<|endoftext|>",), (), lambda said: said + "<|endoftext|>"),
    "zephyr": (("</s>",), (), lambda said: said + "</s>"),
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL: Message = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED: list[Message] = [
    {"role": "user", "content": "is it"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "it is 42"},
]


@cache
def trained() -> str:
    """Return a byte-level tokenizer with merges of words, spaces and newlines, as JSON."""
    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    return inner.to_str()


def tokenizer(template: str, special: Sequence[str], *, eats_space: bool = False) -> Any:
    """Return a tokenizer whose eos is the first special token. eats_space: Special tokens take the space after them."""
    inner = Tokenizer.from_str(trained())
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False, rstrip=eats_space) for s in special])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], bos_token="<s>")
    made.chat_template = template
    return made


@cache
def family(name: str, **how: bool) -> tuple[Any, list[int], Callable[[str], str]]:
    """Return a family's tokenizer, the ids at which it stops, and what the model writes for an answer."""
    special, ends, written = FAMILIES[name]
    made = tokenizer((TEMPLATES / f"{name}.jinja").read_text(), special, **how)
    return made, [made.convert_tokens_to_ids(token) for token in ends], written


def rendered(made: Any, messages: list[Message], **how: Any) -> list[int]:
    """Return the ids that transformers gives a conversation."""
    return made.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
