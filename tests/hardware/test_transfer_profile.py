"""A profile measured on one card, carried to another as their data sheets differ."""

import json
from pathlib import Path

import pytest

from bench.hardware import fit_step_model, predict, transfer_profile

PROFILES = Path(fit_step_model.__file__).parents[2] / "operator" / "plimsoll" / "sim" / "profiles"
MEASURED = json.loads((PROFILES / "h200-8b-launcher.json").read_text())


def test_carried_scales_memory_bound_terms_only() -> None:
    found = transfer_profile.transfer(MEASURED, "8b", "H100-SXM")
    assert found["accelerator"] == "H100-SXM"
    for law, before in ((found, MEASURED), (found["hot"], MEASURED["hot"])):
        assert law["ctx"] == pytest.approx(before["ctx"] * 4.8 / 3.35, rel=1e-4)
        assert 1.2 < law["base"] / before["base"] < 4.8 / 3.35  # launches do not read memory
        assert (law["pretok"], law["preattn"]) == (before["pretok"], before["preattn"])
    assert found["anypre"] == MEASURED["anypre"]  # there is no prior of it
    assert found["kv_tokens"] == predict.from_prior("8b", "H100-SXM")[1]["kv_tokens"] < MEASURED["kv_tokens"] * 0.51


def test_carried_to_same_gpu_is_unchanged() -> None:
    found = transfer_profile.transfer(MEASURED, "8b", "H200")
    assert {name: found[name] for name in predict.COEFFICIENTS} == {
        name: MEASURED[name] for name in predict.COEFFICIENTS
    }


def test_carried_gpu_without_data_sheet_is_rejected() -> None:
    with pytest.raises(ValueError, match="no figures of 'Bench'"):
        transfer_profile.transfer(MEASURED | {"accelerator": "Bench"}, "8b", "H200")


def test_carried_profile_is_readable_by_predict(tmp_path: Path) -> None:
    out = tmp_path / "carried.json"
    assert (
        transfer_profile.main([str(PROFILES / "h200-8b-launcher.json"), "8b", "--gpu", "H100-SXM", "--out", str(out)])
        == 0
    )
    law, plant = predict.from_profile(str(out))
    assert law.cached_token_s == plant["hot"]["ctx"]


def test_predict_model_larger_than_gpu_is_rejected() -> None:
    with pytest.raises(ValueError, match="30b-a3b does not fit on one A100-40G"):
        predict.from_prior("30b-a3b", "A100-40G")
