"""Passes under load, from times of streams: what a server with a known law took gives that law back."""

import itertools
from pathlib import Path

import pytest
from loopback_servers import PacedVLLM, running
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.served import Passes, draft_shares
from draftlab.model import checkpoint

STREAMS, CONTEXTS, K = (1, 2, 4, 8, 16, 24, 32, 40, 48), (50, 250), 4


def law(tokens: int, rows: int, context: float) -> float:
    """Weights once, every token, and the keys and values of every row."""
    return 8.0 + 0.5 * tokens + 0.002 * rows * context


def passes() -> Passes:
    """Many streams at the short context only."""
    return Passes.of({(n, c): law(n, n, c) for n, c in itertools.product(STREAMS, CONTEXTS) if n <= 8 or c == 50})


@pytest.mark.parametrize(("width", "batch"), itertools.product((1, 2, 5, 6), (1, 2, 4, 8)))
def test_a_wide_pass_is_one_of_as_many_streams_that_reads_the_keys_of_its_rows_only(width, batch):
    for context in (0, 50, 400):
        assert passes().ms(width, batch, context) == pytest.approx(law(width * batch, batch, context))


def test_one_context_says_nothing_of_cached_tokens():
    found = Passes.of({(n, 50): law(n, n, 50) for n in STREAMS})
    assert found.ms(1, 4, 0) == pytest.approx(found.ms(1, 4, 900)) == pytest.approx(law(4, 4, 50))


def test_the_draft_has_the_share_that_makes_the_step():
    shares, curve = {1: 0.2, 4: 0.25, 8: 0.35}, passes()
    took = {
        (b, c): curve.ms(K + 1, b, c) + shares[b] * (curve.ms(K + 2, b, c) + (K - 1) * curve.ms(1, b, c))
        for b, c in itertools.product(shares, CONTEXTS)
    }
    assert draft_shares(curve, took, K) == pytest.approx(shares)
    with pytest.raises(UserError, match="at 4 streams a step with the draft takes no longer"):
        draft_shares(curve, took | {(4, c): curve.ms(K + 1, 4, c) for c in CONTEXTS}, K)


@pytest.fixture
def small(family_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"def f{i}(line):\n    return [line, {i}]\n" * 20 for i in range(80))
    )
    return ["--target", str(family_dirs["llama"]), "--data", str(tmp_path / "text.txt"), "--context", "4,24"]


def profiled(small, *arguments: str, code: int = 0):
    few = ["--batch", "1,2", "--tokens", "24", "--repeats", "1", "--out", "out"]
    result = CliRunner().invoke(app, ["profile-servers", *small, *few, *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_servers_that_keep_a_pace_are_profiled_at_it(small, family_dirs):
    tokenizer = checkpoint.load_tokenizer(family_dirs["llama"])
    with running(PacedVLLM(tokenizer, 0.01)) as plain, running(PacedVLLM(tokenizer, 0.025, k=3)) as drafting:
        profiled(small, "--server", plain, "--speculative-server", drafting, "--draft", "mine")
    files = [Path("out") / f"{name}.yaml" for name in (family_dirs["llama"].name, "mine")]
    target, draft = (CostModel.of(read_profile(file)) for file in files)
    contexts = target.contexts
    assert target.forward_ms(4, 2, contexts) == pytest.approx([10, 10], rel=0.4)
    assert draft.steady_ms(1, contexts) == pytest.approx([5, 5], rel=0.6)


def test_servers_in_each_others_place_are_refused(small, family_dirs):
    tokenizer = checkpoint.load_tokenizer(family_dirs["llama"])
    with running(PacedVLLM(tokenizer, 0.0)) as plain, running(PacedVLLM(tokenizer, 0.0, k=3)) as drafting:
        wrong = profiled(small, "--server", plain, "--speculative-server", plain, "--draft", "d", code=1)
        assert "drafts nothing" in wrong.stderr
        wrong = profiled(small, "--server", drafting, code=1)
        assert "must run the target alone" in wrong.stderr
    assert "--speculative-server" in profiled(small, "--server", plain, "--draft", "d", code=1).stderr
