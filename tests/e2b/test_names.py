"""What a program does that knows E2B_DOMAIN and no address: names below the domain are all that it has, and TLS. By the SDK of today and by
the last 1.x, which has no other way."""

import importlib.metadata
import os
import ssl
import urllib.error
import urllib.request

import pytest
from conftest import TIMEOUT, eventually
from e2b import Sandbox

DOMAIN = os.environ.get("E2B_DOMAIN", "")
OLD = int(importlib.metadata.version("e2b").split(".")[0]) < 2

pytestmark = pytest.mark.skipif(not DOMAIN, reason="E2B_DOMAIN is not set")


@pytest.fixture(scope="module")
def sandbox():
    assert "E2B_API_URL" not in os.environ and "E2B_SANDBOX_URL" not in os.environ
    options = {"timeout": TIMEOUT, "metadata": {"who": "names"}, "envs": {"A": "b"}}
    sandbox = Sandbox("base", **options) if OLD else Sandbox.create("base", **options)
    yield sandbox
    sandbox.kill()


def fetch(url, **options):
    with urllib.request.urlopen(urllib.request.Request(url, **options), timeout=60) as answer:
        return answer.read()


def test_a_sandbox_is_of_the_domain(sandbox):
    assert sandbox.sandbox_domain == DOMAIN
    assert sandbox.is_running()
    found = Sandbox.list()
    found = found if isinstance(found, list) else found.next_items()
    assert sandbox.sandbox_id in [one.sandbox_id for one in found]
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.commands.run("echo $A").stdout == "b\n"
    sandbox.set_timeout(TIMEOUT)


def test_commands_have_output_and_users(sandbox):
    assert sandbox.commands.run("id -un").stdout == "user\n"
    assert sandbox.commands.run("id -un", user="root").stdout == "root\n"
    command = sandbox.commands.run("cat", background=True, **({} if OLD else {"stdin": True}))
    assert command.pid in [one.pid for one in sandbox.commands.list()]
    assert sandbox.commands.kill(command.pid) is True


def test_files_are_written_read_and_listed(sandbox):
    sandbox.files.write("names/a", "grüße")
    assert sandbox.files.read("names/a") == "grüße"
    assert [entry.name for entry in sandbox.files.list("names")] == ["a"]
    assert sandbox.files.exists("names/b") is False


def test_the_address_of_a_file_is_all_that_it_takes(sandbox):
    sandbox.files.write("/home/user/signed", "content")
    url = sandbox.download_url("/home/user/signed", use_signature_expiration=300)
    assert f"//49983-{sandbox.sandbox_id}.{DOMAIN}/" in url
    assert fetch(url) == b"content"
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(url.replace("signed", "other"))
    assert refused.value.code == 401
    url = sandbox.upload_url("/home/user/sent", use_signature_expiration=300)
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="sent"\r\n\r\nby form\r\n--x--\r\n'
    fetch(url, data=body, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert sandbox.files.read("/home/user/sent") == "by form"
    past = sandbox.download_url("/home/user/signed", use_signature_expiration=-300)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(past)
    assert refused.value.code == 401


def test_a_port_has_a_name(sandbox):
    sandbox.commands.run("mkdir -p web && echo hello > web/index.html")
    server = sandbox.commands.run("cd web && exec python3 -m http.server 8000 --bind 127.0.0.1", background=True)
    host = sandbox.get_host(8000)
    assert host == f"8000-{sandbox.sandbox_id}.{DOMAIN}"

    def answers():
        try:
            return fetch(f"https://{host}/")
        except urllib.error.HTTPError as error:
            assert error.code == 502
            return None

    assert eventually(answers, "the server") == b"hello\n"
    server.kill()


def test_nobody_else_is_trusted(sandbox):
    """The gateway's own authority is what makes it trusted: without it there is no connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(urllib.error.URLError) as refused:
        urllib.request.urlopen(f"https://api.{DOMAIN}/health", context=context, timeout=60)
    assert isinstance(refused.value.reason, ssl.SSLCertVerificationError)
    assert fetch(f"https://api.{DOMAIN}/health") is not None


def test_a_sandbox_is_killed():
    options = {"timeout": 60}
    sandbox = Sandbox("base", **options) if OLD else Sandbox.create("base", **options)
    assert Sandbox.kill(sandbox.sandbox_id) is True
    assert sandbox.is_running() is False
    assert Sandbox.kill(sandbox.sandbox_id) is False
