"""A law finds back what made the times, speaks of shapes it has not seen, and refuses what does not belong together."""

import json

import numpy as np
import pytest
from helpers.errors import raises_option
from helpers.latencies import SHAPE, latency, profile_of
from helpers.typed import call

from draftlab import shipped
from draftlab.errors import UserError
from draftlab.latency.cost_model import CostModel, Profile, read_profile
from draftlab.latency.scaling_law import default_grid, fit, fit_law, grid_shapes, read_law
from draftlab.model.families import presets
from draftlab.model.shape import Shape, check, check_within, write_shape_file
from draftlab.runs import workspace

TINY = presets(shipped.folder("widths"))["tiny-16x256"]
SHAPES = list(grid_shapes(TINY, [1, 4, 8, 16], [64, 128, 256]).values())
# ms: of a pass, of a layer, of a byte, of a layer and dimension


def made_ms(shape: Shape, overlap: float) -> float:
    """Written out apart from the code under test: tiny's family has neither biases nor a tied head."""
    weights = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn + 2 * shape.hidden)
    size = 4 * (weights + shape.hidden + shape.vocab * shape.hidden)
    issue, work = 0.3 + 0.08 * shape.layers, 1e-7 * size + 1e-4 * shape.layers * shape.hidden
    return (issue**overlap + work**overlap) ** (1 / overlap)


def law_profile(shape: Shape, overlap: float = 1.0, factor: float = 1.0, **changes: object) -> Profile:
    """Return a profile in which a pass over w tokens takes w times as long, and the place of a pass does not matter."""
    ms = factor * made_ms(shape, overlap)
    fields = {
        "name": f"{shape.layers}x{shape.hidden}",
        "shape": shape,
        "prefill": [latency(16, 5 * ms), latency(64, 9 * ms)],
        "host": [latency(1, 0.1), latency(2, 0.2)],
    }
    return profile_of(lambda w, *_: w * ms, widths=(1, 2), batches=(1,), after=(1,), **(fields | changes))


@pytest.mark.parametrize("overlap", [1.0, 2.0, 6.0])
def test_a_known_law_is_found_back(overlap):
    curve = fit(SHAPES, np.array([made_ms(s, overlap) for s in SHAPES]), 4)
    assert curve.overlap == overlap
    assert curve.rms_error < 1e-4
    unseen = TINY.model_copy(update={"layers": 6, "hidden": 192, "heads": 3, "kv_heads": 3, "ffn": 600})
    assert curve.ms(unseen) == pytest.approx(made_ms(unseen, overlap), rel=2e-3)


def test_noise_of_five_percent_stays_below_eight_held_out():
    rng = np.random.default_rng(0)
    law = fit_law([law_profile(s, 1.5, rng.lognormal(0, 0.05)) for s in SHAPES])
    assert np.abs(law.held_out_errors).mean() < 0.08


def test_times_without_a_law_are_not_predicted():
    rng = np.random.default_rng(0)
    law = fit_law([law_profile(s, factor=rng.lognormal(0, 1.0)) for s in SHAPES])
    assert np.abs(law.held_out_errors).mean() > 0.3


def test_a_fitted_profile_predicts_like_a_measured_one():
    law = fit_law([law_profile(s) for s in SHAPES])
    shape = SHAPES[5]
    fitted, measured = CostModel.of(law.profile(shape, "x")), CostModel.of(law_profile(shape))
    at = np.array([16, 30, 64])
    asked = {"forward_ms": (2, 1, at), "steady_ms": (1, at), "prefill_ms": (at,), "host_ms": (2,)}
    for name, point in asked.items():
        mine, theirs = (getattr(cost, name)(*point) for cost in (fitted, measured))
        assert mine == pytest.approx(theirs, rel=1e-2)
    assert fitted.profile.kind == "fitted"


@pytest.mark.parametrize("name", ["tiny-16x256", "llama-3.1-8b"])
def test_the_shapes_to_measure_can_be_cut_and_are_enough(name):
    source = presets(shipped.folder("widths"))[name]
    shapes = grid_shapes(source, *default_grid(source))
    assert len(shapes) >= 9
    for shape in shapes.values():
        check(shape)
        check_within(shape, source)


@pytest.mark.parametrize(
    ("profiles", "complaint"),
    [
        (lambda: [law_profile(s) for s in SHAPES[:5]], "5"),
        (lambda: [law_profile(s, threads=s.layers) for s in SHAPES], "threads"),
    ],
)
def test_what_is_no_law_is_refused(profiles, complaint):
    with raises_option(complaint):
        fit_law(profiles())


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace.write(workspace.PRESETS["tiny"])
    return tmp_path


def test_a_law_is_measured_and_designed_with(space):
    small = space / "small.yaml"
    write_shape_file(SHAPE, small, "a small shape")
    few = "--context 8 --repeats 3 --threads 1 --mode eager"
    made = json.loads(call(f"profile --law {small} {few} --json").stdout)
    assert len(made["held_out_errors"]) == 6
    assert [path.name for path in (space / "runs").iterdir()] == ["law-small"]
    sizes = f"--source {small} --layers 1-2 --multiple-of 8"
    call(f"design {sizes} --law {made['path']} --params 80k")
    assert "--law" in call(f"profile --law {small} tiny", code=1).stderr
    assert read_law(space / made["path"]).ms(SHAPE) > 0


@pytest.mark.parametrize("changes", [{"prefill": [latency(16, 5.0)]}, {"host": [latency(1, 0.0), latency(2, 0.0)]}])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_profile_that_does_not_fit_the_others_gives_no_law(changes):
    profiles = [law_profile(s) for s in SHAPES[1:]] + [law_profile(SHAPES[0], **changes)]
    with pytest.raises(UserError):
        fit_law(profiles).profile(SHAPES[5], "x")


def test_a_model_of_unknown_shape_gives_no_law():
    with raises_option("shape"):
        fit_law([law_profile(s).model_copy(update={"shape": None}) for s in SHAPES])


def test_an_infinite_time_is_not_read(tmp_path):
    text = json.dumps(law_profile(SHAPES[0]).model_dump())
    (tmp_path / "x.yaml").write_text(text.replace('"median_ms": 0.1', '"median_ms": .inf'))
    with raises_option("x.yaml", "median_ms"):
        read_profile(tmp_path / "x.yaml")


@pytest.mark.parametrize("ms", [1e-320, 1e300])
def test_a_pass_that_takes_no_time_or_years_is_no_profile(ms):
    with pytest.raises(ValueError, match="median_ms"):
        law_profile(SHAPES[0], factor=ms)
