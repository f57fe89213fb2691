"""What counts of a conversation is what the model must write, by transformers alone, for the templates of 25 families.

The templates in tests/data/chat_templates name the public files whose form they have. For each answer, transformers
renders the prompt and the conversation up to the answer; what the model must write is given here by hand.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from errors import raises_option
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftlab.data.rendering import Conversation, render
from draftlab.data.text import Message, chat_ids

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
LINES = ["\n\n\nassistant\n\n yes, it is  so\n", "user: yes yes\n\n\n it is  two  lines\n\n"] * 9
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
SYSTEM = {"role": "system", "content": "be brief"}


@cache
def trained() -> str:
    """Return a byte-level tokenizer with merges of words, spaces and newlines, as JSON."""
    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(LINES, trainer)
    return inner.to_str()


def tokenizer(template: str, special: Sequence[str], *, eats_space: bool = False) -> Any:
    """Return a tokenizer whose eos is the first special token. eats_space: Special tokens take the space after them."""
    inner = Tokenizer.from_str(trained())
    inner.add_special_tokens(
        [AddedToken(s, special=True, normalized=False, rstrip=eats_space) for s in special]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], bos_token="<s>")
    made.chat_template = template
    return made


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
ENDINGS = ["yes", "it is so.", "two\nlines\n", "four 🙂", "北京", "  spaces  "]


@cache
def family(name: str, **how: bool) -> tuple[Any, list[int], Callable[[str], str]]:
    """Return a family's tokenizer, the ids at which it stops, and what the model writes for an answer."""
    special, ends, written = FAMILIES[name]
    made = tokenizer((TEMPLATES / f"{name}.jinja").read_text(), special, **how)
    return made, [made.convert_tokens_to_ids(token) for token in ends], written


def talk(*answers: str) -> list[Message]:
    messages: list[Message] = []
    for number, said in enumerate(answers):
        messages += [
            {"role": "user", "content": f"is it {number}"},
            {"role": "assistant", "content": said},
        ]
    return messages


def counted(conversations: list[Conversation], made: Any) -> list[str]:
    """Return the texts of the runs of tokens that count."""
    runs: list[list[int]] = []
    for one in conversations:
        before = False
        for token, counts in zip(one.ids.tolist(), one.counted.tolist(), strict=True):
            if counts and not before:
                runs.append([])
            if counts:
                runs[-1].append(token)
            before = counts
    return [made.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def rendered(made: Any, messages: list[Message], **how: Any) -> list[int]:
    """Return the ids that transformers gives a conversation."""
    return made.apply_chat_template(messages, tokenize=True, return_dict=False, **how)


@pytest.mark.parametrize("said", ENDINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_counts_is_what_the_model_must_write_after_its_prompt(name, said):
    made, ends, written = family(name)
    messages = talk("yes", said, "so")
    found = render(messages, made, "l:1", "assistant", stop_token_ids=ends)
    assert counted(found, made) == [written(text) for text in ("yes", said, "so")]
    wholes = [rendered(made, messages[:end]) for end in (2, 4, 6)]
    wholes = wholes[2:] if len(found) == 1 else wholes
    prompts = [rendered(made, messages[:end], add_generation_prompt=True) for end in (1, 3, 5)]
    for one, whole, prompt in zip(found, wholes, prompts, strict=False):
        ids = one.ids.tolist()
        assert ids[: len(whole)] == whole  # then, in GLM, the next role's marker
        assert all(token in ends for token in ids[len(whole) :])
        read = made.decode(ids[: int(one.counted.argmax())])
        # the prompt of R1 ends with <think>, which its template drops from answers
        assert made.decode(prompt).removesuffix("<think>\n") == read


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gemma2", "falcon")])
def test_a_system_message_does_not_count(name):
    made, ends, written = family(name)
    messages = [SYSTEM, *talk("yes", "no")]
    found = render(messages, made, "l:1", "assistant", stop_token_ids=ends)
    assert counted(found, made) == [written("yes"), written("no")]
    # the template of Mistral v3 writes it before the last message if this is the user's: only in prompts
    assert all("be brief" in made.decode(one.ids) for one in found)
    if name == "mistral_v3":
        for one, end in zip(found, (2, 4), strict=True):
            prompt = made.apply_chat_template(messages[:end], tokenize=False)
            said = written(messages[end]["content"])
            assert one.ids.tolist() == made(prompt + said, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_reasoning_counts_in_the_answers_own_rendering(name):
    made, ends, _ = family(name)
    messages = talk("yes", "no")
    for message in messages[1::2]:
        message["reasoning_content"] = "WHY " + message["content"]
    found = render(messages, made, "l:1", "assistant", stop_token_ids=ends)
    assert [one.ids.tolist() for one in found] == [
        rendered(made, messages[:2]),
        rendered(made, messages),
    ]
    for one, text in zip(counted(found, made), ("yes", "no"), strict=True):
        assert one.index(f"WHY {text}") < one.index(text, one.index("WHY") + 7)


def test_an_answer_that_begins_with_a_newline_is_found_though_the_header_takes_its_first_token():
    made, ends, _ = family("chatml")
    messages = talk("\n\n\nyes", "no")
    (found,) = render(messages, made, "l:1", "assistant", stop_token_ids=ends)
    assert found.ids.tolist() == rendered(made, messages)
    prompt = rendered(made, messages[:1], add_generation_prompt=True)
    assert found.ids.tolist()[: len(prompt)] != prompt  # the newlines are one token
    first, second = counted([found], made)
    assert first.lstrip("\n") == "yes<|im_end|>"
    assert second == "no<|im_end|>"


def test_special_tokens_that_take_the_space_after_them_do_not_count():
    made, ends, _ = family("phi3", eats_space=True)
    messages = talk("\n yes", "no")
    (found,) = render(messages, made, "l:1", "assistant", stop_token_ids=ends)
    assert counted([found], made) == ["yes<|end|>", "no<|end|>"]
    assert found.ids.tolist() == rendered(made, messages)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    "{% if stop %}<|im_end|>{% endif %}{% endgeneration %}{% if not stop %}<|im_end|>{% endif %}\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("said", ENDINGS)
@pytest.mark.parametrize("stop", ["", "{% set stop = true %}"])
@pytest.mark.parametrize("prompt", ["", PROMPT])
def test_generation_tags_count_up_to_the_stop_token_whatever_the_answer_ends_in(said, stop, prompt):
    made = tokenizer(stop + MARKED + prompt, CHATML)
    messages = talk(said, "so")
    (found,) = render(messages, made, "l:1", "assistant")
    assert counted([found], made) == [said + "<|im_end|>", "so<|im_end|>"]
    assert found.ids.tolist() == rendered(made, messages)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL: Message = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED: list[Message] = [
    {"role": "user", "content": "is it"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "it is 42"},
]


def test_tool_calls_are_rendered_by_a_template_that_reads_them_and_count():
    made, ends, written = family("qwen2_5")
    (found,) = render(CALLED, made, "l:1", "assistant", tools=[TOOL], stop_token_ids=ends)
    assert found.ids.tolist() == rendered(made, CALLED, tools=[TOOL])
    call = '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert counted([found], made) == [written(call), written("it is 42")]


def test_a_turn_with_tool_calls_is_left_out_if_the_template_has_none():
    made, ends, written = family("chatml")
    (found,) = render(CALLED, made, "l:1", "assistant", tools=[TOOL], stop_token_ids=ends)
    assert found.ids.tolist() == rendered(made, [CALLED[0], CALLED[3]])
    assert counted([found], made) == [written("it is 42")]
    assert chat_ids(CALLED, made, "l:1") == chat_ids([CALLED[0], CALLED[3]], made, "l:1")


def test_a_call_at_the_end_of_a_turn_stops_there():
    made, ends, _ = family("gpt_oss")
    found = render(CALLED, made, "l:1", "assistant", tools=[TOOL], stop_token_ids=ends)
    assert [text.rpartition("<|message|>")[2] for text in counted(found, made)] == [
        '{"x": 1}<|call|>',
        "it is 42<|return|>",
    ]


def test_an_unknown_stop_token_is_the_first_special_token_after_the_answer():
    made, _, written = family("llama3")
    (found,) = render(talk("yes", "no"), made, "l:1", "assistant")
    assert counted([found], made) == [written("yes"), written("no")]


def test_a_message_that_ends_otherwise_before_its_answer_is_an_error_of_its_row():
    template = "{% for m in messages %}{{ m.content }}{{ '?' if loop.last else '!' }}{% endfor %}"
    with raises_option("l:1"):
        render(talk("yes"), tokenizer(template, CHATML), "l:1", "assistant")


def test_an_answer_without_a_message_before_it_does_not_count():
    made, ends, written = family("chatml")
    messages: list[Message] = [{"role": "assistant", "content": "hello"}, *talk("yes")]
    (found,) = render(messages, made, "l:1", "assistant", stop_token_ids=ends)
    assert counted([found], made) == [written("yes")]


def test_results_of_a_call_that_is_left_out_are_left_out_too():
    template = (
        (TEMPLATES / "chatml.jinja")
        .read_text()
        .replace("'user'", "'user' or message.role == 'tool'")
    )
    made = tokenizer(template, CHATML)
    assert chat_ids(CALLED, made, "l:1") == chat_ids([CALLED[0], CALLED[3]], made, "l:1")
