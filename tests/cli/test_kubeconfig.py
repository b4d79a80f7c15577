"""Which namespace a person works in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from plimsoll.cli.kubeconfig import KubeconfigError, current_namespace, ensure_context
from plimsoll.cli.main import main


def config(path: Path, current: str | None = None, **contexts: str | None) -> Path:
    """A kubeconfig whose contexts have these namespaces."""
    listed = [
        {"name": name, "context": {"cluster": "c", "user": "u"} | ({"namespace": where} if where else {})}
        for name, where in contexts.items()
    ]
    path.write_text(yaml.safe_dump({"contexts": listed} | ({"current-context": current} if current else {})))
    return path


def test_namespace_is_that_of_current_context(tmp_path: Path) -> None:
    path = config(tmp_path / "a", "two", one="first", two="second", three=None)
    assert current_namespace(str(path), {}) == "second"
    assert current_namespace(None, {"KUBECONFIG": str(path)}) == "second"


@pytest.mark.parametrize("current", ["three", "absent", None])
def test_namespace_unset_is_default(tmp_path: Path, current: str | None) -> None:
    assert current_namespace(str(config(tmp_path / "a", current, one="first", three=None)), {}) == "default"


def test_namespace_first_of_several_files_wins(tmp_path: Path) -> None:
    one = config(tmp_path / "one", None, here="first")
    two = config(tmp_path / "two", "here", here="second")
    joined = os.pathsep.join((str(tmp_path / "absent"), str(one), str(two)))
    assert current_namespace(None, {"KUBECONFIG": joined}) == "first"


def test_namespace_in_pod_is_that_of_service_account(tmp_path: Path) -> None:
    inside = tmp_path / "namespace"
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert current_namespace(None, environment, inside) == "default"
    inside.write_text("team\n")
    assert current_namespace(None, environment, inside) == "team"


def test_namespace_unreadable_kubeconfig_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    for content in (b"{", b"\xff\xfe\xff", b"a: [\n"):
        bad.write_bytes(content)
        with pytest.raises(KubeconfigError, match="bad"):
            current_namespace(str(bad), {})
    with pytest.raises(KubeconfigError, match="absent: No such file"):
        current_namespace(str(tmp_path / "absent"), {})
    with pytest.raises(KubeconfigError, match="--kubeconfig"):
        current_namespace(None, {"KUBECONFIG": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    "document",
    [None, 7, [], {"contexts": 7}, {"contexts": [7, None, {"name": 1}], "current-context": "x"},
     {"contexts": [{"name": "x", "context": None}], "current-context": "x"},
     {"contexts": [{"name": "x", "context": {"namespace": 7}}], "current-context": "x"}],
)  # fmt: skip
def test_namespace_malformed_document_is_default(tmp_path: Path, document: object) -> None:
    path = tmp_path / "odd"
    path.write_text(yaml.safe_dump(document))
    assert current_namespace(str(path), {}) == "default"


def test_cluster_without_kubeconfig_or_context_says_what_to_do(tmp_path: Path) -> None:
    path, absent = config(tmp_path / "a", None, one="first"), tmp_path / "absent"
    with pytest.raises(KubeconfigError, match=r"^no kubeconfig at .*absent: set --kubeconfig or \$KUBECONFIG$"):
        ensure_context(None, {"KUBECONFIG": str(absent)})
    with pytest.raises(KubeconfigError, match=r"absent: No such file or directory$"):
        ensure_context(str(absent), {})
    with pytest.raises(KubeconfigError, match=r"/a: has no current-context: run kubectl config use-context NAME$"):
        ensure_context(str(path), {})
    ensure_context(str(config(tmp_path / "b", "one", one="first")), {})
    ensure_context(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": str(absent)})


@pytest.mark.parametrize("words", [["check", "--pre"], ["adopt"], ["prefetch", "chat"], ["key", "list"], ["top"]])
def test_verb_without_kubeconfig_says_so_in_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert main(words) == 1
    assert capsys.readouterr().err == f"plimsoll: no kubeconfig at {tmp_path}/absent: set --kubeconfig or $KUBECONFIG\n"
