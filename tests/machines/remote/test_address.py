"""Addresses: what they may look like, and who may listen where."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mlvm.core.errors import AddressError
from mlvm.machines.remote.address import (
    TcpAddress,
    UnixAddress,
    address_of,
    connect,
    credentials,
    listen,
    parse_address,
    peer_of,
)
from tests.brief import refuses
from tests.cases.claim_tests import claims


@given(st.text())
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert parse_address(str(address)) == address


def test_a_host_that_is_none_is_refused() -> None:
    address = TcpAddress("no.such.host.invalid", 1)
    refuses(AddressError, r"cannot find host 'no\.such\.host\.invalid'", connect, address, 1.0)


def test_a_port_that_is_taken_is_refused() -> None:
    with listen(TcpAddress("127.0.0.1", 0), public=False) as first:
        address = address_of(first, TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        assert address.port > 0
        refuses(AddressError, f"cannot listen on {address}", listen, address, public=False)


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    address = UnixAddress(str(tmp_path / "s"))
    before = os.umask(0)
    try:
        with listen(address, public=False) as sock:
            assert os.stat(address.path).st_mode & 0o777 == 0o600
            with connect(address, 1.0):
                there, _ = sock.accept()
                with there:
                    assert credentials(there) == (os.getpid(), os.getuid())
                    assert str(os.getpid()) in peer_of(there)
    finally:
        os.umask(before)


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    refuses(AddressError, "directory", listen, UnixAddress(str(tmp_path / "s")), public=False)
    refuses(AddressError, "No such file", listen, UnixAddress(f"{tmp_path}/no/s"), public=False)


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "s"))
    listen(address, public=False).close()  # the file stays
    with listen(address, public=False):
        refuses(
            AddressError, "a different server is listening there", listen, address, public=False
        )
        connect(address, 1.0).close()


def test_another_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    refuses(AddressError, "a file of that name", listen, UnixAddress(str(path)), public=False)
    assert path.read_text() == "mine"


def test_a_peer_of_tcp_is_named_by_its_address() -> None:
    with (
        listen(TcpAddress("127.0.0.1", 0), public=False) as sock,
        socket.create_connection(sock.getsockname()) as here,
    ):
        there, _ = sock.accept()
        with there:
            assert peer_of(there) == f"127.0.0.1:{here.getsockname()[1]}"
            assert credentials(there) is None


test_rows = claims("address", globals())
