"""All broken manifests of `tests/api`."""

from __future__ import annotations

from tests.api.cases_adapters import ADAPTER_CASES
from tests.api.cases_admission import ADMISSION_CASES
from tests.api.cases_engines import ENGINE_CASES
from tests.api.cases_model import MODEL_CASES
from tests.api.cases_pod import POD_CASES
from tests.api.cases_runtime import RUNTIME_CASES
from tests.api.cases_scaling import SCALING_CASES
from tests.api.cases_targets import TARGET_CASES
from tests.api.cases_tiers import TIER_CASES

ALL_CASES = [
    *MODEL_CASES,
    *RUNTIME_CASES,
    *TIER_CASES,
    *POD_CASES,
    *SCALING_CASES,
    *ADMISSION_CASES,
    *ADAPTER_CASES,
    *ENGINE_CASES,
    *TARGET_CASES,
]
