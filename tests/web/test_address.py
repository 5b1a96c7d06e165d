"""Where the page is served."""

import pytest

from ttprun.config_sources import resolve
from ttprun.errors import ConfigError
from ttprun.web.companion import Address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":0", "", 0),
        (":8080", "", 8080),
        ("localhost:80", "localhost", 80),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
        ("[::1]:8080", "::1", 8080),
    ],
)
def test_an_address_is_a_port_and_perhaps_a_host(text: str, host: str, port: int) -> None:
    address = parse_address(text)

    assert address == Address(host, port)
    assert address.needs_token == bool(host)


@pytest.mark.parametrize("text", ["8080", "host", ":65536", "http://host:80", "::1:80", ":", "host:port", "a b:1"])
def test_what_is_no_address_is_answered_in_one_line_that_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--http: '.*' is no address; write \[HOST\]:PORT, such as :8080"):
        resolve([], {}, {"http": text})


def test_without_a_host_only_this_machine_is_listened_to_and_a_free_port_is_found() -> None:
    address = parse_address(":0")

    with address.listen() as listener:
        host, port = listener.getsockname()
        url = address.url(listener, "here")

    assert host == "127.0.0.1"
    assert port > 0
    assert url == f"http://127.0.0.1:{port}/"


def test_the_address_of_all_interfaces_is_shown_with_the_name_of_the_machine() -> None:
    address = parse_address("0.0.0.0:0")

    with address.listen() as listener:
        url = address.url(listener, "here")

    assert url.startswith("http://here:")
