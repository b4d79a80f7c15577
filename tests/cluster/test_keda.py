"""What is left of KEDA's source."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.keda import remove_other_scalers

CHOICE = """func buildScaler() {
	// TRIGGERS-START
	switch triggerType {
	case "cron":
		return scalers.NewCronScaler(config)
	case "external":
		return scalers.NewExternalScaler(config)
	// a comment about the next
	case "external-mock":
		return scalers.NewExternalMockScaler(config)
	case "external-push":
		return scalers.NewExternalPushScaler(config)
	case "kafka":
		return scalers.NewKafkaScaler(config)
	default:
		return nil
	}
	// TRIGGERS-END
}
"""


def test_only_external_scalers_are_left(tmp_path: Path) -> None:
    scalers, choice = tmp_path / "pkg/scalers", tmp_path / "pkg/scaling/scalers_builder.go"
    for folder in (scalers / "kafka", choice.parent):
        folder.mkdir(parents=True)
    for name in ("scaler.go", "external_scaler.go", "external_scaler_test.go", "cron_scaler.go", "kafka/client.go"):
        (scalers / name).touch()
    choice.write_text(CHOICE)
    remove_other_scalers(tmp_path)
    left = {str(path.relative_to(scalers)) for path in scalers.rglob("*.go")}
    assert left == {"scaler.go", "external_scaler.go", "rest.go", "kafka/client.go"}
    lines = [line.strip() for line in choice.read_text().splitlines()]
    assert [line for line in lines if line.startswith(("case", "default", "switch", "}"))] == [
        "switch triggerType {", 'case "external":', 'case "external-push":', "default:", "}", "}",
    ]  # fmt: skip
