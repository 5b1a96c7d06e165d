"""The command that names the hosts of an elastic job: real commands. Scenario A23."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from ttprun.agent.lead.membership import Discovery
from ttprun.errors import ConfigError


def test_a23_a_command_that_fails_at_first_is_refused_with_what_it_says() -> None:
    with pytest.raises(ConfigError, match=r"--discovery: 'echo no such list >&2; exit 3' fails: exit code 3 \(no such"):
        Discovery("echo no such list >&2; exit 3", 2).first()


def test_a23_a_command_that_names_no_host_at_first_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "hosts").touch()
    found = Discovery(f"cat {tmp_path}/hosts", 2, every_s=0.01)
    waiting = threading.Thread(target=found.first)
    waiting.start()
    time.sleep(0.1)

    assert waiting.is_alive()
    (tmp_path / "hosts").write_text("127.0.0.1:4\n")
    waiting.join(60)

    assert found.named == {"127.0.0.1": 2}


@pytest.mark.parametrize(("later", "why"), [(None, "exit code 1"), ("\n\n", "it names no host"), ("a:b", "host:slots")])
def test_a23_a_command_that_fails_later_changes_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, later: str | None, why: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1\n")
    found = Discovery(f"cat {hosts}", 2)
    found.first()
    hosts.unlink() if later is None else hosts.write_text(later)

    with caplog.at_level(logging.WARNING, "ttprun"):
        found.poll()
        found.poll()

    assert found.named == {"127.0.0.1": 1}
    assert len(caplog.messages) == 1
    assert why in caplog.messages[0]
    hosts.write_text("127.0.0.1\n127.0.0.2")
    found.poll()
    assert found.named == {"127.0.0.1": 1, "127.0.0.2": 1}
