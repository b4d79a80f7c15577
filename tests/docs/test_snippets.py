"""What stands in code blocks of the documentation is true: Python runs and prints what is shown, YAML is accepted.

All Python blocks of a page run in their order and share their names, as cells of a notebook do; a `text` block right
after one is what it prints. YAML is judged by what it is: a manifest, a part of a manifest's spec, or chart values.
"""

from __future__ import annotations

import contextlib
import io
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from plimsoll.api import labels
from plimsoll.api.api_keys import read_secret
from plimsoll.api.contract import engine_tls_name, internal_tls_name
from plimsoll.api.v1alpha1 import parse
from tests.chart.rendering import CHART, NAMESPACE, ROOT, render

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<EOF\n(.*?)^EOF$", re.MULTILINE | re.DOTALL)
LEAST: dict[str, Any] = {"model": {"uri": "hf://org/model"}, "tiers": {"serve": {}}}


class Block(NamedTuple):
    """One fenced block: its language, its text, and what stands in the text block right behind it, if one does."""

    line: int
    language: str
    text: str
    printed: str | None


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    whole = page.read_text()
    found = list(FENCE.finditer(whole))
    for number, match in enumerate(found):
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and after[2] == "text" and not whole[match.end() : after.start()].strip()
        text = "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))
        printed = after[3] if follows and after is not None else None
        yield Block(whole.count("\n", 0, match.start()) + 1, match[2], text, printed)


def documents() -> list[Any]:
    """Every YAML document of the pages, also those that a shell passes to kubectl, as (page:line, document)."""
    found = []
    for page in pages():
        for block in blocks(page):
            texts = [block.text] if block.language == "yaml" else HEREDOC.findall(block.text)
            place = f"{page.relative_to(ROOT)}:{block.line}"
            found += [pytest.param(d, id=place) for text in texts for d in yaml.safe_load_all(text)]
    return found


WITH_PYTHON = [page for page in pages() if any(block.language == "python" for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_snippets_print_shown_output(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.language != "python":
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True), names)
        assert output.getvalue() == (block.printed or ""), f"line {block.line}"


@pytest.mark.parametrize(("name", "count"), [("capacity", 5), ("slo", 1)])
def test_concept_page_shows_the_computed_figures(name: str, count: int) -> None:
    computed = {block.printed for block in blocks(ROOT / "docs" / "evaluation" / "concept-figures.md")}
    shown = [block.text for block in blocks(ROOT / "docs" / "concepts" / f"{name}.md") if block.language == "text"]
    assert len([text for text in shown if text in computed]) == count


@pytest.mark.parametrize("document", documents())
def test_yaml_snippet_is_valid(document: dict[str, Any]) -> None:
    """A manifest of ours is parsed whole, a spec is completed; chart values pass the chart's schema."""
    if document.get("kind") == "InferenceService":
        parse({**document, "metadata": {"namespace": "default", **document["metadata"]}})
    elif document.keys() == {"spec"}:
        metadata = {"name": "chat", "namespace": "default"}
        kind = {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata}
        parse({**kind, "spec": {**LEAST, **document["spec"]}})
    elif labels.API_KEY in document.get("metadata", {}).get("labels", {}):
        data = {field: b64encode(value.encode()).decode() for field, value in document["stringData"].items()}
        assert read_secret({**document, "data": data}).name == document["metadata"]["name"]
    elif document.get("kind") == "Certificate" and "client auth" in document["spec"].get("usages", ()):
        name, namespace = document["spec"]["secretName"], document["metadata"]["namespace"]
        tls_name = internal_tls_name if namespace == NAMESPACE else engine_tls_name
        assert render({"internalTls": {"secretName": name}, "engine": {"tls": {"secretName": name}}})
        assert document["spec"]["dnsNames"] == [tls_name(namespace)]
        assert document["spec"]["usages"] == ["server auth", "client auth"]
    elif document.get("kind") == "Certificate":
        assert render({"gateway": {"tls": {"secretName": document["spec"]["secretName"]}}})
        assert document["metadata"]["namespace"] == NAMESPACE
        assert f"plimsoll-gateway.{NAMESPACE}.svc" in document["spec"]["dnsNames"]
    elif document.get("kind") == "TriggerAuthentication":  # as KEDA names them
        found = {one["parameter"]: one["key"] for one in document["spec"]["secretTargetRef"]}
        assert found == {"caCert": "ca.crt", "tlsClientCert": "tls.crt", "tlsClientKey": "tls.key"}
    elif document.keys() <= yaml.safe_load((CHART / "values.yaml").read_text()).keys():
        namespace, *_ = *document.get("watchNamespaces", ()), NAMESPACE  # a release is in one that it watches
        assert render(document, "--namespace", namespace)
    else:
        elsewhere = document.get("kind") in {"HorizontalPodAutoscaler", "ScaledObject"} or "externalRules" in document
        known = elsewhere or document.get("kind") == "Role" or "scrape_configs" in document
        assert known, "of no known sort: judge it here, or in a module of its own as test_followers"


LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)?(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link may name behind #: headings as GitHub makes anchors of them, and those set by hand."""
    text = FENCE.sub("", page.read_text())
    named = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text)]
    found = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in named}
    return found | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        there = page.parent / path if path else page
        assert there.exists(), path
        assert not anchor or anchor in anchors(there), f"{path}#{anchor}"
