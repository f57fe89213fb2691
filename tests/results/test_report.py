"""Laws of reports: every number is the record's, every name is only text, a page loads nothing, warnings are exact."""

import io
import re
from dataclasses import replace
from html import escape

import pytest
from helpers.scores import (
    ACC,
    PROMPTS,
    Page,
    board,
    change,
    conditioned,
    rendered,
    score,
    speculative,
)
from rich.console import Console

from draftlab.results.ranking import grouped, score_warnings
from draftlab.results.report import export_command, html, json_rows, markdown, target_named
from draftlab.results.score import PromptRecord, Score
from draftlab.results.tables import Table
from draftlab.runs.provenance import Stage


def with_cuts(steps_cut: int, of: int) -> Score:
    runs = [speculative(i, [4] * (of // PROMPTS), 4, 0.3, cut=steps_cut // 2 if i < 2 else 0) for i in range(PROMPTS)]
    return change(score(), speculative={4: runs})


def markdown_rows(text: str) -> list[dict[str, str]]:
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    heads = [cell.strip() for cell in lines[0]]
    board = [line for line in lines[2:] if len(line) == len(heads)]
    return [dict(zip(heads, (cell.strip() for cell in line), strict=True)) for line in board]


@pytest.mark.parametrize("command", ["draftlab score --target 'x", "draftlab score --target \\"])
def test_a_command_that_another_recorded_names_no_target(command):
    assert target_named(score("a").model_copy(update={"command": command})) is None


def draft_rows(text: str) -> list[dict[str, str]]:
    return [row for row in markdown_rows(text) if not row["draft"].startswith("no draft")]


def test_markdown_holds_the_records_numbers():
    (row,) = draft_rows(markdown([score()]))
    assert row == {
        "draft": "wide",
        "layers x hidden": "2 x 64",
        # embedding and head 2 x 512 x 64, per layer 2 x 64 x 64 + 2 x 32 x 64 + 3 x 64 x 176 + 2 x 64, final norm 64
        "parameters": "158k",
        "draft ms per pass": "2.50",
        "K": "4",
        "accept rate": "50.0%",
        "tokens per pass": "3.00",
        "tok/s": "50.0",
        "speed-up (95%)": "2.00x (2.00 to 2.00)",
        "TPOT (95%)": "2.00x (2.00 to 2.00)",
        "TTFT, ms": "20.0",
        "weights, target/draft": "float32/float32",
        "accuracy": "0.612 ± 0.014",
    }


def test_accuracy_column_never_mixes_tasks():
    other = ACC.model_copy(update={"task": "other_choice"})
    rows = draft_rows(markdown([score("a"), score("b", speed=0.9, tasks=(other,))]))
    assert [row["accuracy"] for row in rows] == ["0.612 ± 0.014", "–"]


HOSTILE = '<b>"x"</b> | & [red]y[/red] $z$ _w_'


def test_names_are_text_on_the_page_and_in_tables():
    other = score("_other", speed=0.9)
    source = html([score(HOSTILE), other], command="draftlab report <i>")
    page = Page(source)
    (row, _) = draft_rows(markdown([score(HOSTILE), other]))
    assert row["draft"] == '&lt;b&gt;"x"&lt;/b&gt; \\| &amp; [red]y[/red] $z$ _w_'
    assert not {"b", "i"} & {tag for tag, _ in page.tags}
    assert HOSTILE in page.text
    assert "_w_" in page.text  # the label in a plot, where a pair of $ would be mathematics
    assert "_other" in page.text
    assert escape("draftlab report <i>") in source


def test_a_draft_with_a_long_name_has_its_numbers_in_a_narrow_table():
    names = ["a-draft-with-quite-a-long-name", *(f"draft-{i}" for i in range(1, 5))]
    scores = [score(name, speed=1 - 0.1 * i) for i, name in enumerate(names)]
    lines = rendered(board(*scores), 80).splitlines()
    assert max(map(len, lines)) <= 80
    first = next(i for i, line in enumerate(lines) if line.startswith("* "))
    words = " ".join(lines[first : first + 2]).split()
    assert {"4", "50.0%", "3.00", "50.0", "2.00x", "2.00-2.00", "0.612"} <= set(words)
    # the best draft, and the caption that explains the mark
    assert sum(line.startswith("* ") for line in lines) == 2


def cells_of(table: Table) -> set[str]:
    """Return all words of all cells. Intervals are written as in terminals, 1.9-2.1 in place of (1.9 to 2.1)."""
    cells = " ".join(cell for row in table.rows for cell in row)
    return set(re.sub(r"\((\S+) to (\S+)\)", r"\1-\2", cells).split())


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200, None])
def test_no_width_loses_a_column_or_cuts_a_number(width: int | None):
    table = board(score("wide"), score("deep", speed=0.9))
    if width is None:
        stream = io.StringIO()  # as a pipe or a file
        Console(file=stream).print(table.terminal(), soft_wrap=True)
        text = stream.getvalue()
    else:
        text = rendered(table, width)
        assert max(map(len, text.splitlines())) <= width
    words = text.split()
    shown = dict(enumerate(table.titles))
    if width == 80:
        absent = [i for i, head in enumerate(table.heads) if head in table.wide]
        left_out = " ".join(words).partition("Left out")[2]
        assert all(shown.pop(i) in left_out for i in absent)
    kept = replace(table, rows=[[row[i] for i in shown] for row in table.rows])
    assert cells_of(kept) <= set(words)
    assert ("Left out" in " ".join(words)) == (width == 80)


def test_page_loads_nothing():
    source = html([score("a"), score("b", speed=0.9)], command="draftlab report a b")
    page = Page(source)
    assert page.open == []
    loading = {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not loading & {tag for tag, _ in page.tags}
    attributes = [pair for _, attrs in page.tags for pair in attrs.items()]
    addresses = [str(value) for name, value in attributes if name in ("href", "src", "xlink:href")]
    ids = [value for name, value in attributes if name == "id"]
    wanted = {address.removeprefix("#") for address in addresses}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", str(attributes)))
    assert len(ids) == len(set(ids))
    assert addresses
    assert wanted <= set(ids)
    assert "http" not in source
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)


@pytest.mark.parametrize(("speeds", "at"), [((1.0, 0.4), 1), ((0.4, 0.3), 0)])
def test_no_draft_has_its_place_in_every_ranking(speeds: tuple[float, ...], at: int):
    scores = [score(f"d{i}", speed=speed) for i, speed in enumerate(speeds)]
    names = ["d0", "d1"]
    names.insert(at, "no draft, float32")
    assert [row["draft"] for row in markdown_rows(markdown(scores))] == names
    source = html(scores, command="")
    (ranked,) = re.findall(r'aria-label="Ranking"><table.*?</table>', source, re.S)
    assert re.findall(r'<th scope="row">(?:<span.*?</span> )?([^<]*)<', ranked) == names
    table = rendered(board(*scores), 120)
    assert sorted(names, key=table.index) == names
    assert "1.00x" in next(line for line in table.splitlines() if "no draft" in line)


STAGES = [
    Stage(command="prune", output="p", seconds=30, tokens=1000),
    Stage(command="distill", output="d", seconds=630, tokens=2_000_000),
]


def test_the_cost_of_a_draft_is_its_records():
    made = [change(score("d"), made=STAGES), score("old", speed=0.8)]
    assert re.search(r"\| d +\| 11\.0 +\| 2M +\|", markdown(made))
    assert "distill 10 min" in Page(html(made, command="")).text


def test_a_steps_time_is_its_phases():
    """A step of the draft takes 0.3 s / 5, and one of the target alone 0.6 s / 15; a third of the first is drafting."""
    source = html([score()], command="")
    table = re.search(r'aria-label="Where the time of a step goes"><table.*?</table>', source, re.S)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in table[0].split("<tr")[2:]]
    assert cells == [
        ["0.00", "40.0", "0.00", "40.0", "1.00", "40.0"],
        ["20.0", "30.0", "10.0", "60.0", "3.00", "20.0"],
    ]


def test_json_has_vllms_names_and_the_records_numbers():
    row = json_rows([score()])[1]
    counts = {
        "num_spec_steps": 5 * PROMPTS,
        "num_draft_tokens": 20 * PROMPTS,
        "num_accepted_draft_tokens": 10 * PROMPTS,
        "draft_acceptance_rate": 0.5,
        "mean_acceptance_length": 3.0,
        "per_position_acceptance": [0.8, 0.6, 0.4, 0.2],
        "acceptance_histogram": [PROMPTS] * 5,
        "kv_bytes_per_token": 512,
        "accuracy": 0.612,
        "identical": True,
    }
    measured = {
        "speedup": 2,
        "speedup_low": 2,
        "speedup_high": 2,
        "output_tps": 50,
        "plain_output_tps": 25,
        "draft_share": 1 / 3,
        "verify_share": 1 / 2,
        "host_share": 1 / 6,
        "break_even_length": 1.5,
    }
    assert {name: row[name] for name in counts} == counts
    assert {name: row[name] for name in measured} == pytest.approx(measured)


@pytest.mark.parametrize(
    "faulty",
    [
        change(score(), equal_texts=0.5),
        change(score(), distinct_4grams=0.49),
        change(score(), prompts=[PromptRecord(tokens=32, conversation=i // 2) for i in range(PROMPTS)]),
        change(score(), prompts=[]),
        with_cuts(4, of=24),
    ],
    ids=["lossy", "loop", "few", "older", "cut"],
)
def test_each_fault_gives_its_own_warning_everywhere(faulty: Score):
    (found,) = score_warnings([faulty])
    assert f"- Warning: {found}" in markdown([faulty])
    assert found in Page(html([faulty], command="")).text


def test_no_warning_up_to_the_bar():
    sound = [
        score(),
        change(score(), equal_texts=None),
        change(score(), distinct_4grams=0.5),
        with_cuts(6, of=60),
    ]
    assert [score_warnings([each]) for each in sound] == [[]] * 4


def test_unequal_conditions_are_listed():
    others = [score("a"), conditioned(score("b"), threads=4)]
    assert "| threads | 1 (a); 4 (b) |" in markdown(others)


def test_page_draws_every_draft_and_opens_with_answer_picture_and_table():
    scores = [score(f"draft-{i}", speed=1 - 0.05 * i, layers=1 + i, tasks=()) for i in range(8)]
    source = html(scores, command="")
    page = Page(source)
    assert sum(tag == "svg" for tag, _ in page.tags) == 4
    assert all(page.text.count(f"draft-{i}") >= 5 for i in range(8))
    assert "nan" not in "".join(attrs.get("d") or "" for _, attrs in page.tags)
    body = source[source.index("<h1>") :]
    places = [body.index(part) for part in ('class="answer"', "<svg", "<table", "<h2>Details")]
    assert places == sorted(places)


def test_a_draft_that_gains_is_exported_by_the_command_on_the_page():
    command = "draftlab score --draft 'runs/a b' --target models/t --k 1,4"
    one = change(score("a b"), command=command)
    groups = grouped([one])
    assert export_command(groups) == "draftlab export 'runs/a b' --target models/t --to vllm --k 4"
    assert export_command(groups) in Page(html([one], command="")).text
    rounded = change(score("a@q8_0"), command="draftlab score --draft runs/a@q8_0")
    words = export_command(grouped([rounded])).split()
    assert words[2:7] == ["runs/a", "--to", "llama.cpp", "--outtype", "q8_0"]
    for other in (change(one, equal_texts=0.5), change(score("a b", speed=0.4), command=command)):
        assert export_command(grouped([other])) == ""


def test_control_characters_of_a_score_reach_no_terminal_and_no_page():
    made = [score("EVIL\x1b]0;owned\x07\x1b[31m")]
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None).print(board(*made).terminal())
    for text in (stream.getvalue(), markdown(made), html(made, command="")):
        assert "EVIL" in text
        assert not {c for c in text if not c.isprintable()} - {"\n", "\t"}
