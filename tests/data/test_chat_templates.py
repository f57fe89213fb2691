"""What counts of a conversation is what the model must write, by transformers alone, for the templates of 25 families.

The templates in tests/files/chat_templates name the public files whose form they have. For each answer, transformers
renders the prompt and the conversation up to the answer; what the model must write is given here by hand.
"""

from typing import Any

import pytest
from helpers.chat_templates import (
    CALLED,
    CHATML,
    FAMILIES,
    TEMPLATES,
    TOOL,
    family,
    rendered,
    tokenizer,
)
from helpers.errors import raises_option

from draftlab.data.rendering import Conversation, render
from draftlab.data.text import Message, chat_ids

SYSTEM = {"role": "system", "content": "be brief"}


ENDINGS = ["yes", "it is so.", "two\nlines\n", "four 🙂", "北京", "  spaces  "]


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
    template = (TEMPLATES / "chatml.jinja").read_text().replace("'user'", "'user' or message.role == 'tool'")
    made = tokenizer(template, CHATML)
    assert chat_ids(CALLED, made, "l:1") == chat_ids([CALLED[0], CALLED[3]], made, "l:1")
