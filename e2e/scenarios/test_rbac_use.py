"""Least privilege: every right of the chart's roles was used, by the audit log of the whole run.

It comes last, after everything is uninstalled. The log of an earlier run on this cluster counts too, so it can run
alone after one. A right that only scenarios outside of this run use is not expected.
"""

from __future__ import annotations

import pytest
import yaml

from e2e.lib import rbac_use, stack
from e2e.lib.kube import Cluster
from e2e.lib.node import audit_calls_of


def test_operator_and_gateway_use_all_their_rights(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    values = ["--values", str(stack.VALUES), "-n", stack.SYSTEM]
    rendered = cluster.helm("template", stack.RELEASE, str(stack.CHART), *values)
    objects = [one for one in yaml.safe_load_all(rendered) if one]
    calls = audit_calls_of(stack.SYSTEM)
    assert any(call.verb == "watch" for call in calls), "the audit log shows no reads: make the cluster again"

    granted = rbac_use.rights(objects)
    scenarios = {item.path.stem.removeprefix("test_") for item in request.session.items}
    never = rbac_use.unused(granted, calls, rbac_use.accounts(objects))
    print(f"{len(calls)} calls used {len(granted) - len(never)} of {len(granted)} rights; never used:")
    print("\n".join(map(str, never)))
    unexpected = [right for right in never if right not in rbac_use.excused(scenarios)]
    assert not unexpected, "never used: remove them from the chart, or list them in e2e/lib/rbac_use.py:\n" + "\n".join(
        map(str, unexpected)
    )
