"""How `tamis serve` is reached: over TLS, over a Unix socket, below a path."""

import datetime
import http.client
import ipaddress
import json
import socket
import ssl
import stat
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from serve_process import ServeProcess

from tamis.bindings.serve.http import front, listen
from tamis.cli.commands import serve
from tamis.cli.options.errors import UsageError

ASKED = {"messages": [{"role": "user", "content": "the hand"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Files of a certificate of 127.0.0.1 that vouches for itself, and of its key."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file, locked = (folder / each for each in ("cert.pem", "key.pem", "locked.pem"))
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(*form, serialization.NoEncryption()))
    locked.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"pw")))
    return cert_file, key_file, locked


def asked(connection, path="/v1/chat/completions", body=ASKED):
    """Status and reply of a request; GET without a body."""
    headers = {"Content-Type": "application/json", "Host": "localhost"}
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read() or b"null")


class OverPath(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self.path))


@pytest.mark.slow  # 6 s: handshakes that wait
def test_it_speaks_tls_and_waits_for_no_handshake(path, tmp_path, pem):
    cert, key, _ = pem
    flags = "--ssl-cert-file", str(cert), "--ssl-key-file", str(key), "--max-connections", "4"
    with ServeProcess(path, tmp_path, *flags, "--timeout-header", "2") as server:
        trusted = ssl.create_default_context(cafile=str(cert))

        def over_tls():
            where = "127.0.0.1", server.port
            return http.client.HTTPSConnection(*where, context=trusted, timeout=30)

        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        time.sleep(1.2)  # then they are handed to the server, whose handshakes wait for them
        assert asked(over_tls())[0] == 200
        assert asked(over_tls(), "/health", None) == (200, {"status": "ok"})
        assert "https://127.0.0.1:" in server.log.read_text()
        for connection in silent:
            connection.settimeout(10)
            assert connection.recv(1) == b""  # the time for a head is over
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            asked(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10), "/health", None)


def test_bad_certificates_are_named(pem, tmp_path):
    cert, key, locked = map(str, pem)
    with pytest.raises(UsageError, match="--ssl-cert-file and --ssl-key-file"):
        serve._tls(cert, None)
    for wrong in (cert, locked):
        with pytest.raises(UsageError, match="no certificate with its own unencrypted key"):
            serve._tls(cert, wrong)
    with pytest.raises(FileNotFoundError, match="absent"):
        serve._tls(str(tmp_path / "absent"), key)


def test_a_unix_socket_is_its_users_alone(path, tmp_path):
    where = tmp_path / "a.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(where))
    left.close()  # a file that nothing listens on, as after a crash
    with ServeProcess(path, tmp_path, "--host", f"127.0.0.1,{where}") as server:
        assert stat.S_IMODE(where.stat().st_mode) == 0o600
        assert asked(OverPath(where))[0] == 200
        assert asked(OverPath(where), "/health", None) == (200, {"status": "ok"})
        with pytest.raises(OSError, match=r"in use.*a\.sock"), listen._unix_listener(where):
            pass
        server.process.terminate()
        assert server.process.wait(10) == 0
    assert not where.exists()


def test_a_socket_of_another_server_is_not_removed(tmp_path):
    where = tmp_path / "a.sock"
    with listen._unix_listener(where):
        where.unlink()
        where.write_text("another's")
    assert where.read_text() == "another's"
    with pytest.raises(OSError, match="in use"), listen._unix_listener(where):
        pass


def test_all_paths_lie_below_a_prefix(path, tmp_path):
    with ServeProcess(path, tmp_path, "--api-prefix", "/a/llm/") as server:
        assert server.post(ASKED, "/a/llm/v1/chat/completions")[0] == 200
        assert server.get("/a/llm/health") == (200, b'{"status":"ok"}')
        assert b"<html" in server.get("/a/llm/")[1]
        for wrong in ("/health", "/v1/models", "/a/llms/health", "/"):
            status, body = server.get(wrong)
            assert (status, "/a/llm" in body.decode()) == (404, True)
        assert f":{server.port}/a/llm:" in server.log.read_text()


def test_health_below_a_prefix_is_answered_in_front():
    hosts, head = frozenset([b"localhost"]), b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    starts = front.starts_of("/x")
    assert isinstance(front.judge(b"GET /x/health" + head, hosts, starts), front.Asked)
    assert front.judge(b"GET /health" + head, hosts, starts) is False


@pytest.mark.parametrize("text", ["llm", "//x", "/x y", "/é"])
def test_prefixes_that_are_no_paths_are_refused(text):
    with pytest.raises(Exception, match="is no path such as /llm"):
        serve._prefix(text)


def test_a_handshake_counts_as_a_connection():
    gate = listen._Gate(listen.Connections(total=8), lambda line: None)
    gate._total = 1
    gate.add(listen._Handshake(), "1.2.3.4")
    assert not gate.admits("1.2.3.5")
