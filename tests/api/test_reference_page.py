"""The generated page of InferenceService."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.api import reference_page

PAGE = Path(__file__).parents[2] / reference_page.REFERENCE_PATH


def test_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page.render()


@pytest.mark.parametrize(
    "line",
    [
        "| `tiers.TIER.gpus` (integer) | GPUs of each pod of an engine: 0 to 64. Absent: 1. |",
        "| `engine.env` (list, at most 128) | Environment variables. They override the chart's defaults."
        " Fields as in a pod. |",
        "| `engine.lora.maxLoraRank` (`8`, `16`, `32`, `64`, `128`, `256`, `320`, `512`) | Highest rank of an adapter"
        " (`--max-lora-rank`). GPU memory grows with it. Absent: 16. |",
        "| `tiers.TIER.pod.imagePullSecrets[].name` | Name of the Secret. |",
        "- `tiers.TIER.maxReplicas`, `targets.TIER.maxReplicas`, `scaling.schedule[].maxReplicas`: must not be"
        " below minReplicas",
        "| `tiers.TIER.summary` | Ready and desired pods, such as 2/3. |",
        "| `scaling.warmReplicas` (integer) | Replicas that each tier keeps beyond those it"
        " needs, up to maxReplicas: 0 to 1000. Absent: 0. |",
        "- `scaling.prefillPerDecode`: is allowed only with prefill and decode tiers, not with serve",
        "| `admission.classes[].slo.{ttft,ttftPerKToken,tpot,e2e}` | As in `slo`. |",
        "| `adapters[].revision` | As `model.revision`. |",
        "- `adapters`: adapters and engine.lora need the tier serve",
        "- `model.digest`: is allowed only for s3://, gs:// and https:// models",
        "- `engine.version`: image and version are mutually exclusive",
        "- `admission.fallback`: is allowed only with whenFull: Downgrade",
        "| URL* | `url` |",
        "| MODEL | `modelNames[0]` |",
        "| REASON | Reason of the condition Ready. |",
    ],
)
def test_reference_page_has_line_per_field_rule_and_column(line: str) -> None:
    assert reference_page.render().splitlines().count(line) == 1


def test_reference_page_has_no_rule_about_form_of_one_value() -> None:
    page = reference_page.render()
    assert "- `metadata.name`: must have at most 40 characters" in page
    assert "must be from 5 seconds to 24 hours" not in page


def test_reference_page_has_no_fields_of_a_condition() -> None:
    page = reference_page.render()
    assert "| `conditions` |" in page
    assert "conditions[]." not in page


@pytest.mark.parametrize("left_out", [".pod.", "engine.env[]", "the engine has no ", "--served-model-name"])
def test_reference_page_has_no_rule_about_pods_or_one_engine(left_out: str) -> None:
    rules = [line for line in reference_page.render().splitlines() if line.startswith("- ")]
    assert len(rules) > 30
    assert [line for line in rules if left_out in line] == []
