"""What a model makes of pictures is learned from the prompt tokens that engines count."""

from __future__ import annotations

from random import Random

import pytest

from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.token_ratios import TokenRatioEstimator
from plimsoll.core.prompt_tokens import corrected_tokens
from plimsoll.core.types import Role, Unavailable
from tests.core.signal_readings import NOW_S, SHARE, gateway
from tests.core.test_signals import engine


def learn(
    true: dict[str, float], image_share: float, minutes: int = 20, rate_per_s: float = 5.0, spread: float = 0.3
) -> TokenRatioEstimator:
    """Requests of about 500 text tokens; a share of them has a picture of about 1,000. Engines count a second later."""
    random, made = Random(1), TokenRatioEstimator()
    later: tuple[float, float] = (0.0, 0.0)
    for second in range(60 * minutes):
        requests, text, image = 0, 0.0, 0.0
        for _ in range(int(rate_per_s)):
            requests += 1
            text += 500 * random.uniform(1 - spread, 1 + spread)
            if random.random() < image_share:
                image += 1000 * random.uniform(1 - spread, 1 + spread)
        made.on_estimated(float(second), requests, text + image, {"image": image} if image else {})
        made.on_counted(float(second), *later)
        later = requests, true["text"] * text + true["image"] * image
    return made


@pytest.mark.parametrize("image", [0.1, 0.26, 1.0, 3.0])
@pytest.mark.parametrize("text", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_ratios_are_learned_within_factor(share: float, text: float, image: float) -> None:
    """A service with a picture in each twentieth request, in each second, and in each."""
    ratios = learn({"text": text, "image": image}, share).ratios()
    counted = text * 500 + image * 1000
    estimated = corrected_tokens(1500, {"image": 1000}, ratios)
    assert counted / 1.5 <= estimated <= 1.5 * counted


def test_total_is_exact_for_constant_mix() -> None:
    ratios = learn({"text": 0.8, "image": 0.26}, 1.0, spread=0.0).ratios()
    assert corrected_tokens(1500, {"image": 1000}, ratios) == pytest.approx(0.8 * 500 + 260, rel=0.02)


def learn_text(ratio: float, seconds: int = 600, rejected: float = 0.0) -> TokenRatioEstimator:
    """A service without media: five requests a second, as many of which are rejected."""
    made, random = TokenRatioEstimator(), Random(2)
    for second in range(seconds):
        tokens = sum(500 * random.expovariate(1.0) for _ in range(5))
        made.on_estimated(float(second), 5.0, tokens, {}, rejected)
        made.on_counted(float(second), 5.0, ratio * tokens)
    return made


@pytest.mark.parametrize("ratio", [0.96, 1.0, 1.04])
def test_text_close_to_estimate_has_no_ratio(ratio: float) -> None:
    made = learn_text(ratio)
    assert made.ratios() == {}
    assert corrected_tokens(123.0, {}, made.ratios()) == 123.0


@pytest.mark.parametrize("ratio", [0.4, 0.7, 1.5, 2.0])
def test_text_far_from_estimate_has_its_ratio(ratio: float) -> None:
    made = learn_text(ratio, seconds=61)
    assert made.ratios() == {"text": pytest.approx(ratio, rel=0.05)}


def test_text_is_not_learned_while_requests_are_rejected() -> None:
    """Engines count the admitted prompts only, and the long ones are rejected first."""
    assert learn_text(0.6, rejected=1.0).ratios() == {}


def test_prompts_never_counted_do_not_outweigh_the_others() -> None:
    """A client sends long prompts and goes away before an engine has begun with them."""
    made = TokenRatioEstimator()
    for second in range(3600):
        is_attack = 600 <= second < 660
        made.on_estimated(float(second), 5.0 + is_attack, 2500.0 + 128_000.0 * is_attack, {})
        made.on_counted(float(second), 5.0, 2500.0)
        assert made.ratios().get("text", 1.0) >= 0.8
    assert made.ratios().get("text", 1.0) >= 0.95


def test_text_ratio_stays_possible_for_counts_near_nothing() -> None:
    made = TokenRatioEstimator()
    for second in range(1200):
        made.on_estimated(float(second), 6.0, 130_000.0, {})
        made.on_counted(float(second), 5.0, 2500.0)
    assert made.ratios() == {"text": 0.25}


def test_text_ratio_follows_the_text_back() -> None:
    made = learn_text(0.6)
    for second in range(600, 7800):
        made.on_estimated(float(second), 5.0, 2500.0, {})
        made.on_counted(float(second), 5.0, 2500.0)
    assert made.ratios() == {"text": pytest.approx(1.0, abs=0.05)}


def test_ratios_before_evidence_are_absent() -> None:
    made = TokenRatioEstimator()
    made.on_estimated(0.0, 1.0, 1500.0, {"image": 1000.0})
    made.on_counted(1.0, 1.0, 700.0)
    assert made.ratios() == {}


def test_ratios_stay_in_range_for_absurd_counts() -> None:
    for tokens in (1e12, 1e-3):
        made = TokenRatioEstimator()
        for second in range(600):
            made.on_estimated(float(second), 5.0, 7500.0, {"image": 5000.0})
            made.on_counted(float(second), 5.0, tokens)
        assert all(0.05 <= ratio <= 20.0 for ratio in made.ratios().values())


def test_clock_set_back_loses_one_window_only() -> None:
    made = learn({"text": 1.0, "image": 0.26}, 0.5)
    before = dict(made.ratios())
    made.on_estimated(-1e6, 5.0, 7500.0, {"image": 5000.0})
    assert made.ratios() == pytest.approx(before, rel=0.05)


def test_mean_prompt_tokens_follows_mix_of_pictures() -> None:
    """A model makes 260 tokens of a picture that counts as 1,000. Pictures in each second request, then in none."""
    listener, images, ended = MetricsAggregator([Role.SERVE]), 0.0, 0.0
    for t in range(1300):
        share = 0.0 if t >= 1230 else 0.5 if t // 60 % 2 else 0.3
        images += 5.0 * share
        arrived = 5.0 * t
        reading = gateway(
            arrived, arrived_tokens=300.0 * arrived + 1000.0 * images, arrived_media_tokens={"image": 1000.0 * images}
        )
        listener.observe_gateway("g", "1", NOW_S + t, reading)
        if t % 5 == 0:
            ended = 300.0 * arrived + 260.0 * images
            counted = engine(float(t), at_s=NOW_S + t, local_prompt_tokens=ended, cached_prompt_tokens=0.0)
            listener.observe_engine(Role.SERVE, counted)
    metrics = listener.collect(NOW_S + 1300, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert not isinstance(metrics.mean_prompt_tokens, Unavailable)
    assert metrics.mean_prompt_tokens == pytest.approx(300.0, rel=0.1)
    assert metrics.token_ratios["image"] == pytest.approx(0.26, abs=0.1)
    assert metrics.token_ratios["text"] == pytest.approx(1.0, abs=0.1)
