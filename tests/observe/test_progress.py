"""The line that says how far a long piece of work is."""

from __future__ import annotations

import threading

import pytest

from ttprun.observe.console import ProgressLine, ProgressLog, format_bytes


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1200, "1.2 kB"), (345_678_000, "346 MB"), (5e12, "5.0 TB")]
)
def test_bytes_are_reported_in_powers_of_1000(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("verifying", 100, lambda: 50):
        pass

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("size", "text"), [(2_000_000, "500 kB of 2.0 MB (25 %), "), (0, "0 s so far")])
def test_long_work_reports_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, size: int, text: str
) -> None:
    monkeypatch.setattr("ttprun.observe.console.SILENT_S", 0.01)
    asked = threading.Event()

    def count() -> int:
        asked.set()
        return 500_000

    with ProgressLine("verifying step-00000120", size, count):
        assert asked.wait(60)

    assert capsys.readouterr().err.startswith(f"verifying step-00000120: {text}")


def test_the_log_says_how_far_long_work_is_and_not_at_every_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttprun.observe.console.SILENT_S", 0.0)
    progress = ProgressLog("writing a checkpoint")

    progress.show(500_000, 2_000_000)
    progress.show(600_000, 2_000_000)

    assert [record.message for record in caplog.records] == ["writing a checkpoint: 500 kB of 2.0 MB in 0 s"]
