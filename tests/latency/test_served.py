"""ServedPasses under load, from times of streams: what a server with a known law took gives that law back."""

import itertools
from pathlib import Path

import pytest
from errors import raises_option
from loopback_servers import PacedVLLM, running
from typed import call
from typer.testing import Result

from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.served import ServedPasses, draft_shares
from draftlab.model import checkpoint

STREAMS, CONTEXTS, K = (1, 2, 4, 8, 16, 24, 32, 40, 48), (50, 250), 4


def law(tokens: int, rows: int, context: float) -> float:
    """Weights once, every token, and the keys and values of every row."""
    return 8.0 + 0.5 * tokens + 0.002 * rows * context


def passes() -> ServedPasses:
    """Many streams at the short context only."""
    return ServedPasses.of(
        {(n, c): law(n, n, c) for n, c in itertools.product(STREAMS, CONTEXTS) if n <= 8 or c == 50}
    )


@pytest.mark.parametrize(("width", "batch"), itertools.product((1, 2, 5, 6), (1, 2, 4, 8)))
def test_a_wide_pass_is_one_of_as_many_streams_that_reads_the_keys_of_its_rows_only(width, batch):
    for context in (0, 50, 400):
        assert passes().ms(width, batch, context) == pytest.approx(
            law(width * batch, batch, context)
        )


def test_one_context_says_nothing_of_cached_tokens():
    found = ServedPasses.of({(n, 50): law(n, n, 50) for n in STREAMS})
    assert found.ms(1, 4, 0) == pytest.approx(found.ms(1, 4, 900)) == pytest.approx(law(4, 4, 50))


def test_the_draft_has_the_share_that_makes_the_step():
    shares, curve = {1: 0.2, 4: 0.25, 8: 0.35}, passes()
    took = {
        (b, c): curve.ms(K + 1, b, c)
        + shares[b] * (curve.ms(K + 2, b, c) + (K - 1) * curve.ms(1, b, c))
        for b, c in itertools.product(shares, CONTEXTS)
    }
    assert draft_shares(curve, took, K) == pytest.approx(shares)
    with raises_option("4"):
        draft_shares(curve, took | {(4, c): curve.ms(K + 1, 4, c) for c in CONTEXTS}, K)


@pytest.fixture
def target(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return family_dirs["llama"]


def profiled(target: Path, servers: list[str], *models: str, code: int = 0) -> Result:
    named = [word for server in servers for word in ("--server", server)]
    few = "--context 4,24 --batch 1,2 --repeats 3 --out out"
    return call(f"profile {few}", target, *models, *named, code=code)


@pytest.mark.slow
def test_servers_that_keep_a_pace_are_profiled_at_it(target):
    tokenizer = checkpoint.load_tokenizer(target)
    with (
        running(PacedVLLM(tokenizer, 0.01)) as plain,
        running(PacedVLLM(tokenizer, 0.025, k=3)) as drafting,
    ):
        profiled(target, [plain, drafting], "mine")
    files = [Path("out") / f"{name}.yaml" for name in (target.name, "mine")]
    costs, draft = (CostModel.of(read_profile(file)) for file in files)
    assert costs.forward_ms(4, 2, costs.contexts) == pytest.approx([10, 10], rel=0.4)
    assert draft.steady_ms(1, costs.contexts) == pytest.approx([5, 5], rel=0.6)


def test_servers_in_each_others_place_are_refused(target):
    tokenizer = checkpoint.load_tokenizer(target)
    with (
        running(PacedVLLM(tokenizer, 0.0)) as plain,
        running(PacedVLLM(tokenizer, 0.0, k=3)) as drafting,
    ):
        for servers, models in (([plain, plain], ["d"]), ([drafting], [])):
            assert "--server" in profiled(target, servers, *models, code=1).stderr
    assert "--server" in profiled(target, ["nope"], code=1).stderr
