"""Profiles hold what was asked for, of models as they are used, and are measured right behind what they say."""

import itertools
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.latencies import SHAPE
from helpers.small_files import edit, write_workspace
from helpers.typed import call
from torch.profiler import ProfilerActivity, profile

from draftlab.engine.clocks import clock_for
from draftlab.engine.timing import WARM_UP_ROUNDS, bandwidth_gbs, matmul_tflops, time_interleaved
from draftlab.latency.cost_model import CostModel, read_profile
from draftlab.latency.profiler import (
    AFTER,
    Grid,
    RandomWeights,
    host_times,
    measure,
    measure_passes,
    random_model,
)
from draftlab.model import llama
from draftlab.model.hf_decoder import HFDecoder
from draftlab.model.modes import with_mode
from draftlab.model.shape import write_shape_file

CPU = torch.device("cpu")
GRID = Grid(widths=[1, 3], batches=[1, 2], contexts=[8, 20], prompts=[8, 20], repeats=2)
GROUPED = SHAPE.model_copy(update={"kv_heads": 2, "tied": True, "qkv_bias": True, "qk_norm": True})


@pytest.mark.parametrize("shape", [SHAPE, GROUPED])
def test_random_models_are_of_their_shape_and_decode(shape):
    model = random_model(shape, torch.float32, CPU, 32)
    weights = RandomWeights(shape, torch.float32, CPU)
    assert sum(weights[name].numel() for name in weights) == shape.params()
    logits = model.forward(torch.tensor([[1, 2, 3]]), model.new_cache(1, 8))
    assert logits.shape == (1, 3, shape.vocab)
    assert 0.1 < logits.std() < 10  # neither vanishing nor overflowing


def test_every_point_of_the_grid_is_measured(monkeypatch):
    """Widths, rows and contexts are also seen where they arrive: in the models themselves."""
    shapes = {"one": SHAPE, "other": GROUPED}
    models = {n: random_model(shape, torch.float32, CPU, 64) for n, shape in shapes.items()}
    seen, real = set(), llama.Llama.forward

    def watched(self, ids, cache, last=0):
        seen.add((ids.shape[1], ids.shape[0], cache.used[0]))
        return real(self, ids, cache, last)

    monkeypatch.setattr(llama.Llama, "forward", watched)
    grid = list(itertools.product(GRID.widths, GRID.batches, GRID.contexts))
    for curves in measure(models, GRID, clock=clock_for(CPU)).values():
        assert [(p.width, p.batch, p.context) for p in curves.forward] == grid
        steady = [(p.after, p.width, p.batch, p.context) for p in curves.steady]
        assert steady == list(itertools.product(AFTER, [1], GRID.batches, GRID.contexts))
        assert [p.width for p in curves.prefill] == GRID.prompts
        assert [p.width for p in curves.host] == GRID.widths
        every = [*curves.forward, *curves.steady, *curves.prefill, *curves.host]
        assert all(0 < p.low_ms <= p.median_ms <= p.high_ms and p.n == GRID.repeats for p in every)
    assert seen >= {*grid, *((length, 1, 0) for length in GRID.prompts)}


def test_passes_are_timed_at_their_places_whatever_the_order_of_models():
    """A clock of a machine that needs 10 s more for the first pass of a model after another model's.

    So a first pass never costs less than a later one, and two listings of the same models agree to the last digit.
    """
    now, before = [0.0], [""]

    class Priced(HFDecoder):
        """Only the cost of a pass is of interest: 1 s for each token, and 10 s if another model ran before."""

        def __init__(self, name: str) -> None:
            self.name, self.context = name, 64

        device = CPU
        weight_bytes = 1 << 20

        def new_cache(self, rows: int, capacity: int):
            return SimpleNamespace(used=[0] * rows)

        def forward(self, ids, cache, last=0):
            now[0] += ids.shape[1] + (10 if before[0] != self.name else 0)
            before[0] = self.name

    def measured(names):
        timed = {name: Priced(name) for name in names}
        return measure_passes(timed, GRID, clock=lambda: now[0])

    found = measured(["target", "draft", "other"])
    for curves in found.values():
        assert {p.median_ms for p in curves.forward if p.width == 1} == {11e3}
        assert {p.median_ms for p in curves.forward if p.width == 3} == {13e3}
        assert {p.median_ms for p in curves.steady} == {1e3}
    assert measured(["other", "draft", "target"]) == found


def test_only_the_second_of_a_pair_is_timed_and_no_round_before_all_is_warm():
    now, calls = [0.0], []

    def costs(name: str, seconds: float, first: float = 0.0):
        def run() -> None:
            now[0] += seconds + (first if len(calls) < 6 else 0)
            calls.append(name)

        return run

    tasks = [
        [(None, costs("lead", 5)), ("a", costs("a", 1, first=100))],
        [(None, costs("lead", 7)), ("b", costs("b", 2))],
    ]
    times = time_interleaved(tasks, repeats=3, clock=lambda: now[0])
    assert times == {"a": [1000.0] * 3, "b": [2000.0] * 3}
    assert all(calls[i] == "lead" for i in range(0, len(calls), 2))
    order = calls[1::2]
    assert "".join(order[-4:]) in ("abba", "baab")  # turned every round
    assert WARM_UP_ROUNDS[0] <= len(order) / 2 - 3 <= WARM_UP_ROUNDS[1]


def test_host_time_leaves_the_pass_out():
    model = random_model(SHAPE.model_copy(update={"layers": 24}), torch.float32, CPU, 64)
    grid = replace(GRID, widths=[3], batches=[1], contexts=[8], prompts=[8], after=())
    host = sorted(host_times(model, 3, grid, clock_for(CPU)))
    passes = measure_passes({"m": model}, grid, clock=clock_for(CPU))["m"].forward
    assert 0 < host[len(host) // 2] < passes[0].median_ms


def test_ceilings_are_positive_and_bound_a_pass():
    model = random_model(SHAPE, torch.float32, CPU, 64)
    weights = SHAPE.params() - SHAPE.vocab * SHAPE.hidden
    again = measure({"m": model}, GRID, clock=clock_for(CPU))["m"].steady[0]
    assert weights * 4 / 1e6 / again.median_ms < bandwidth_gbs(weights, torch.float32, CPU)
    assert matmul_tflops(torch.float32, CPU) > 1e-3


@pytest.mark.gpu
def test_captured_passes_are_measured():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    cuda = torch.device("cuda")
    model = random_model(SHAPE, torch.bfloat16, cuda, 64)
    replays = {}
    for mode in ("eager", "graphs"):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
            measure({"m": with_mode(model, mode)}, GRID, clock=clock_for(cuda))
        launches = [e.count for e in watched.key_averages() if e.key == "cudaGraphLaunch"]
        replays[mode] = sum(launches)
    assert replays["eager"] == 0
    points = len(GRID.widths) * len(GRID.batches) * len(GRID.contexts)
    assert replays["graphs"] >= points * GRID.repeats


@pytest.fixture
def space(tmp_path, monkeypatch, family_dirs):
    monkeypatch.chdir(tmp_path)
    write_workspace(family_dirs["llama"])
    write_shape_file(SHAPE, tmp_path / "small.yaml", "a small shape")
    return family_dirs["llama"]


SMALL = "--context 8,16 --repeats 3 --mode eager --threads 1"


def test_profiling_as_typed_a_checkpoint_beside_a_shape(space, tmp_path):
    call(f"profile {space} small.yaml --k 2 {SMALL}")
    out = tmp_path / "runs" / "profile-llama-small"
    found = {name: read_profile(out / f"{name}.yaml") for name in ("llama", "small")}
    assert found["small"].sha256 is None
    assert found["llama"].sha256
    assert found["small"].shape == SHAPE
    assert CostModel.of(found["llama"]).widths.tolist() == [1, 2, 3]
    assert json.loads((out / "draftlab.json").read_text())["command"] == "profile"


def test_a_parallel_draft_is_profiled_as_wide_as_it_drafts(space, tmp_path):
    """A pass over K tokens of the step before and K masks, so that predict never asks beyond the profile."""
    shutil.copytree(space, tmp_path / "parallel")
    edit(tmp_path / "parallel/config.json", pard_token=2, pard_offsets=4)
    call(f"profile parallel --k 4 {SMALL} --out profiles")
    costs = CostModel.of(read_profile(tmp_path / "profiles" / "parallel.yaml"))
    assert costs.widths.tolist() == [*range(1, 6), 8]
