"""A learning curve's interval holds as often as it says, and a forecast is the curve's inverse."""

import numpy as np
import pytest

from draftlab.errors import UserError
from draftlab.training.learning_curve import EXPONENTS, Pilot, fit, forecast

K = 4


def pilots(limit, scale, exponent, tokens, deviation=0.0, rng=None):
    exact = [limit - scale * (t / tokens[0]) ** -exponent for t in tokens]
    noise = np.zeros(len(tokens)) if rng is None else rng.normal(0, deviation, len(tokens))
    return [
        Pilot(tokens=t, length=max(1.0, y + e), deviation=deviation, seconds=t / 100)
        for t, y, e in zip(tokens, exact, noise, strict=True)
    ]


def drawn_truth(rng):
    limit = rng.uniform(1.8, K + 1)
    return limit, rng.uniform(0.1, limit - 1.2), rng.choice(EXPONENTS)


@pytest.mark.parametrize("count", [3, 5])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(count):
    """95 % intervals, over 150 curves with noise that the fit knows; binomial noise is 1.8 points."""
    rng, inside, trials = np.random.default_rng(count), 0, 150
    for _ in range(trials):
        limit, scale, exponent = drawn_truth(rng)
        tokens = [1e5 * 2**i for i in range(count)]
        curve = fit(pilots(limit, scale, exponent, tokens, 0.02, rng), K)
        later = 4 * tokens[-1]
        truth, predicted = limit - scale * (later / tokens[0]) ** -exponent, curve.at(later)
        inside += predicted.low <= truth <= predicted.high
    assert 0.9 <= inside / trials <= 1.0


def test_an_interval_of_half_the_noise_holds_it_less_often():
    """The control: a fit that believes the noise to be a tenth of what it is must fail the law above."""
    rng, inside, trials = np.random.default_rng(0), 0, 100
    for _ in range(trials):
        limit, scale, exponent = drawn_truth(rng)
        tokens = [1e5 * 2**i for i in range(5)]
        noisy = pilots(limit, scale, exponent, tokens, 0.1, rng)
        curve = fit([p.model_copy(update={"deviation": 0.01}) for p in noisy], K)
        truth, predicted = limit - scale * 64**-exponent, curve.at(64 * tokens[0])
        inside += predicted.low <= truth <= predicted.high
    assert inside / trials < 0.9


def test_a_quarter_of_a_run_predicts_its_end():
    points = pilots(2.6, 1.0, 0.4, [2e5, 4e5, 8e5, 1.6e6], 0.005, np.random.default_rng(1))
    end = 2.6 - 1.0 * 32**-0.4
    predicted = fit(points, K).at(6.4e6)
    assert predicted.value == pytest.approx(end, rel=0.05)
    assert predicted.low <= end <= predicted.high


def test_more_points_narrow_the_interval():
    few, many = (fit(pilots(2.6, 1.0, 0.4, [2e5 * 2**i for i in range(n)], 0.01), K).at(1e8) for n in (2, 7))
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_training_never_costs_length_and_never_passes_all_tokens_accepted():
    curve = fit(pilots(2.0, 0.5, 0.5, [1e5, 2e5], 0.05), K)
    assert (curve.scale >= 0).all()
    assert curve.most.high <= K + 1
    assert curve.gain(2e5, 4e5).low >= 0
    assert curve.at(1e12).value <= curve.most.value + 1e-6


def test_a_forecast_inverts_the_curve_and_counts_its_hours():
    points = pilots(2.6, 1.0, 0.4, [2e5 * 2**i for i in range(6)], 0.002)
    cost = forecast(points, 2.4, k=K, devices=8)
    truth = 2e5 * (1.0 / 0.2) ** (1 / 0.4)
    assert cost.tokens_low is not None
    assert cost.tokens_high is not None
    assert cost.tokens_low <= truth <= cost.tokens_high
    assert cost.tokens == pytest.approx(truth, rel=0.3)
    assert cost.tokens_per_second == pytest.approx(100)
    assert cost.hours == pytest.approx(cost.tokens / 100 / 3600)
    assert cost.device_hours == pytest.approx(8 * cost.hours)
    assert "device hours" in cost.line()


def test_a_length_above_the_limit_is_out_of_reach():
    cost = forecast(pilots(2.0, 0.8, 0.8, [2e5 * 2**i for i in range(8)], 0.002), 3.0, k=K)
    assert (cost.tokens, cost.hours, cost.device_hours) == (None, None, None)
    assert cost.chance < 0.05
    assert "out of reach" in cost.line()


def test_one_point_is_no_curve_and_a_length_beyond_k_is_refused():
    points = pilots(2.0, 0.8, 0.8, [1e5, 2e5], 0.01)
    for wrong, said in ((points[:1], "two pilot runs"), ([points[0], points[0]], "two pilot runs")):
        with pytest.raises(UserError, match=said):
            fit(wrong, K)
    with pytest.raises(UserError, match="between 1 and 5"):
        forecast(points, 6, k=K)
