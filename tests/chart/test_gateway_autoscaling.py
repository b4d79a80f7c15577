"""`gateway.autoscaling`: an autoscaler that a real API server takes, and nothing else that sets the number of pods."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.apiserver import ApiServer, api_server
from tests.chart.rendering import RenderError, containers, find, of_kind, pod_specs, render

NAME = "plimsoll-gateway"
SCALED = {"gateway": {"replicas": 1, "autoscaling": {"maxReplicas": 6, "pickerCpu": "750m"}}}


def test_number_of_pods_is_fixed_by_default() -> None:
    assert of_kind(render(), "HorizontalPodAutoscaler") == []
    assert find(render(), "Deployment", NAME)["spec"]["replicas"] == 2


def test_values_of_an_earlier_chart_have_no_autoscaler() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    assert render({"gateway": {"autoscaling": None}}) == render()
    assert of_kind(
        render({"gateway": {"autoscaling": {"pickerCpu": None, "maxReplicas": 3}}}), "HorizontalPodAutoscaler"
    )


def test_autoscaler_alone_sets_the_number_of_pods() -> None:
    objects = render(SCALED)
    assert "replicas" not in find(objects, "Deployment", NAME)["spec"]
    spec = find(objects, "HorizontalPodAutoscaler", NAME)["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 6)
    assert spec["metrics"][0]["containerResource"]["container"] in {
        one["name"] for one in containers(pod_specs(objects)[NAME])
    }


def test_pods_that_may_become_several_are_spread_and_kept() -> None:
    objects = render(SCALED)
    assert "podAntiAffinity" in pod_specs(objects)[NAME]["affinity"]
    assert of_kind(objects, "PodDisruptionBudget", NAME) != []


@pytest.mark.api
def test_api_server_accepts_the_autoscaler(apiserver: ApiServer) -> None:
    made = find(render(SCALED, "--namespace", "default"), "HorizontalPodAutoscaler", NAME)
    command = [str(apiserver.kubectl), f"--kubeconfig={apiserver.kubeconfig}", "create", "--dry-run=server", "-f", "-"]
    done = subprocess.run(command, input=json.dumps(made), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.api
def test_upgrade_keeps_the_number_of_pods() -> None:
    """Without the field, Kubernetes would set 1 until the autoscaler looks. Helm refuses objects of other releases."""
    made = find(render({"gateway": {"replicas": 4}}, "--namespace", "default"), "Deployment", NAME)
    made["metadata"]["annotations"] = {
        "meta.helm.sh/release-name": "plimsoll",
        "meta.helm.sh/release-namespace": "default",
    }
    with api_server() as server:
        kubectl = [str(server.kubectl), f"--kubeconfig={server.kubeconfig}", "--namespace=default"]
        subprocess.run([*kubectl, "create", "-f", "-"], input=json.dumps(made), text=True, check=True)
        live = ("--namespace", "default", "--dry-run=server", "--kubeconfig", str(server.kubeconfig))
        assert find(render(SCALED, *live), "Deployment", NAME)["spec"]["replicas"] == 4


@pytest.mark.parametrize(("smallest", "largest"), [(3, 2), (0, 2)])
def test_bounds_that_contradict_are_refused(smallest: int, largest: int) -> None:
    with pytest.raises(
        RenderError, match=f"gateway.autoscaling.maxReplicas is {largest}, and gateway.replicas is {smallest}"
    ):
        render({"gateway": {"replicas": smallest, "autoscaling": {"maxReplicas": largest}}})


@pytest.mark.parametrize("cpu", ["0", "0m", "600 m", "-1", "much"])
def test_cpu_that_is_no_quantity_is_refused(cpu: str) -> None:
    with pytest.raises(RenderError, match="pickerCpu"):
        render({"gateway": {"autoscaling": {"maxReplicas": 3, "pickerCpu": cpu}}})
