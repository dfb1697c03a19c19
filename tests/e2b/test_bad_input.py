"""What programs do wrong and strangers try: an error that says what is the matter, and everything as it was before. What the gateway holds
after all tests is looked at by the step that runs them."""

import asyncio
import json
import os
import socket
import struct
import time
import urllib.parse

import pytest
from conftest import eventually, made, made_async
from e2b import CommandExitException, Sandbox, SandboxException
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    SandboxNotFoundException,
    SandboxNotRunningException,
)

NOBODY = "e2b_" + "0" * 64
UNKNOWN = "0123456789ab"


def connection():
    url = urllib.parse.urlsplit(os.environ["E2B_SANDBOX_URL"])
    return socket.create_connection((url.hostname, url.port or 80), timeout=60)


def head(sandbox, method, path, token=None, **fields):
    """A request's head, as the SDKs write it."""
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"E2b-Sandbox-Id: {sandbox.sandbox_id}", "E2b-Sandbox-Port: 49983"]
    lines.append(f"X-Access-Token: {token or sandbox._envd_access_token}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def start(sandbox, command):
    """A request that starts a command and is answered by a stream."""
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-c", command]}}).encode()
    body = struct.pack(">BI", 0, len(message)) + message
    fields = {"Content_Type": "application/connect+json", "Connect_Protocol_Version": "1", "Content_Length": len(body)}
    return head(sandbox, "POST", "/process.Process/Start", **fields) + body


def until_end(stream):
    received = b""
    while chunk := stream.recv(65536):
        received += chunk
    return received


@pytest.mark.parametrize("ask", [Sandbox.get_info, Sandbox.kill, Sandbox.connect, Sandbox.pause, Sandbox.get_metrics])
def test_a_key_that_nobody_has(sandbox, ask):
    with pytest.raises(AuthenticationException):
        ask(sandbox.sandbox_id, api_key=NOBODY)
    assert sandbox.is_running()


@pytest.mark.parametrize("key", ["x", "e2b_", "e2b_" + "0" * 63, "e2b_" + "0" * 10_000])
def test_what_is_no_key(key):
    with pytest.raises(AuthenticationException):
        Sandbox.list(api_key=key).next_items()


def test_a_token_of_another_sandbox(sandbox):
    with made() as other, connection() as stream:
        stream.sendall(head(other, "GET", "/files?path=/etc/passwd", sandbox._envd_access_token, Connection="close"))
        assert until_end(stream).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("ask", [Sandbox.get_info, Sandbox.connect, Sandbox.pause, Sandbox.get_metrics])
@pytest.mark.parametrize("unknown", [UNKNOWN, "no-such-sandbox", "../x", "..%2f..%2fsandboxes", "a" * 2000, "ä blank"])
def test_an_id_that_nobody_has(ask, unknown):
    with pytest.raises(SandboxException) as refused:
        ask(unknown)
    assert "500" not in str(refused.value)
    if "/" not in unknown:
        assert isinstance(refused.value, NotFoundException)
    if unknown == UNKNOWN:
        assert UNKNOWN in str(refused.value)


def test_a_sandbox_whose_time_is_over():
    sandbox = Sandbox.create("base", timeout=600)
    command = sandbox.commands.run("sleep 1000", background=True)
    sandbox.set_timeout(0)
    eventually(lambda: not sandbox.is_running(), "its end")
    for ask in (lambda: sandbox.commands.run("true"), lambda: sandbox.files.read("/etc/passwd")):
        with pytest.raises(SandboxNotRunningException):
            ask()
    # It was killed with the sandbox, which may have been told yet.
    with pytest.raises((SandboxNotRunningException, CommandExitException)):
        command.wait()
    with pytest.raises(SandboxNotFoundException):
        sandbox.set_timeout(60)
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_an_upload_that_is_larger_than_the_disk(sandbox):
    sandbox.commands.run("mkdir -p /tmp/small && mount -t tmpfs -o size=1m,mode=777 none /tmp/small", user="root")
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("/tmp/small/large", b"x" * 3_000_000)
    sandbox.commands.run("rm -f /tmp/small/*", user="root")
    sandbox.files.write("/tmp/small/fits", b"x" * 1000)
    assert len(sandbox.files.read("/tmp/small/fits")) == 1000


def test_a_request_that_is_larger_than_the_api_takes():
    for options in ({"metadata": {"a": "x" * 2_000_000}}, {"envs": {"A": "x" * 60_000}}, {"metadata": {str(n): "" for n in range(300)}}):
        with pytest.raises(SandboxException) as refused:
            Sandbox.create("base", timeout=60, **options)
        assert str(refused.value).startswith("400: "), refused.value


def test_a_client_that_reads_slowly(sandbox):
    with connection() as stream:
        # 8 MB of which nothing is read for a while: the command waits, and nothing is lost.
        stream.sendall(start(sandbox, "seq 1 1000000; echo the end"))
        time.sleep(3)
        received = b""
        while b'"exited":true' not in received[-4096:] and (chunk := stream.recv(1 << 20)):
            received += chunk
    assert b'"exited":true' in received[-4096:] and len(received) > 8_000_000
    assert sandbox.commands.run("echo well").stdout == "well\n"


def test_a_client_that_writes_slowly(sandbox):
    with connection() as stream:
        stream.sendall(head(sandbox, "POST", "/files?path=slow", Content_Type="application/octet-stream", Content_Length=10, Connection="close"))
        for _ in range(10):
            time.sleep(0.2)
            stream.sendall(b"x")
        assert until_end(stream).startswith(b"HTTP/1.1 200 ")
    assert sandbox.files.read("slow") == "x" * 10


def test_a_stream_that_is_half_closed(sandbox):
    with connection() as stream:
        stream.sendall(start(sandbox, "sleep 0.5; echo done"))
        stream.shutdown(socket.SHUT_WR)
        # Whoever has nothing more to ask is still answered, or its connection ends; it never hangs.
        stream.settimeout(30)
        until_end(stream)
    with connection() as stream:
        stream.sendall(head(sandbox, "POST", "/files?path=half", Content_Type="application/octet-stream", Content_Length=1000))
        stream.sendall(b"x" * 10)
        stream.shutdown(socket.SHUT_WR)
        stream.settimeout(30)
        assert not until_end(stream).startswith(b"HTTP/1.1 200 ")
    assert sandbox.commands.run("echo well").stdout == "well\n"


def test_clients_that_vanish_in_midstream(sandbox):
    mark = "while-they-vanish"
    streams = [connection() for _ in range(20)]
    for stream in streams:
        stream.sendall(start(sandbox, f"exec -a {mark} sleep 1000"))
    for stream in streams:
        assert stream.recv(12) == b"HTTP/1.1 200"
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    # The commands go on, as a client may come back; there is room for others. A shell that was answered for need not be the program yet.
    count = f"pgrep -cf '^{mark}' || true"
    eventually(lambda: sandbox.commands.run(count).stdout == "20\n", "all of the commands")
    sandbox.commands.run(f"pkill -f '^{mark}'")
    eventually(lambda: sandbox.commands.run(count).stdout == "0\n", "the commands' end")


def test_uploads_that_vanish_in_midstream(sandbox):
    def is_open(count):
        return sandbox.commands.run("ls -l /proc/1/fd | grep -c vanished || true", user="root").stdout == f"{count}\n"

    streams = [connection() for _ in range(10)]
    for number, stream in enumerate(streams):
        fields = {"Content_Type": "application/octet-stream", "Content_Length": 1_000_000}
        stream.sendall(head(sandbox, "POST", f"/files?path=vanished/{number}", **fields) + b"x" * 1000)
    eventually(lambda: is_open(10), "files to be written")
    for stream in streams:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    eventually(lambda: is_open(0), "files to be closed")
    sandbox.files.write("vanished/0", "whole")
    assert sandbox.files.read("vanished/0") == "whole"


def test_ten_thousand_files_in_a_directory(sandbox):
    sandbox.commands.run("mkdir crowd && cd crowd && seq -f 'file-%05g' 1 10000 | xargs touch", timeout=180)
    found = sandbox.files.list("crowd", request_timeout=120)
    assert sorted(entry.name for entry in found) == [f"file-{number:05}" for number in range(1, 10001)]
    sandbox.files.remove("crowd")
    assert not sandbox.files.exists("crowd")


@pytest.mark.parametrize("name", ["with blank", "per%41cent", "plus+and&and=and?and#", "quote\"'`$(x)", "new\nline", "世界🦀", "a" * 255, "-rf", "\\"])
def test_names_that_are_odd(sandbox, name):
    path = f"/home/user/odd/{name}"
    sandbox.files.write(path, name)
    assert sandbox.files.read(path) == name
    assert [entry.name for entry in sandbox.files.list("odd")] == [name]
    assert sandbox.files.get_info(path).path == path
    sandbox.files.rename(path, f"/home/user/odd-{len(name)}")
    sandbox.files.remove(f"/home/user/odd-{len(name)}")
    assert sandbox.files.list("odd") == []


def test_names_that_are_no_text(sandbox):
    sandbox.commands.run("mkdir -p binary && cd binary && touch \"$(printf 'not\\377utf8')\" plain")
    names = [entry.name for entry in sandbox.files.list("binary")]
    assert "plain" in names and len(names) == 2 and any(name.startswith("not") for name in names)
    sandbox.files.remove("binary")


@pytest.mark.parametrize("path", ["a" * 256, "/".join("a" * 200 for _ in range(30)), "zero\0byte", ""])
def test_names_that_cannot_be(sandbox, path):
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write(path, "x")


def test_a_path_that_climbs_stays_in_the_sandbox(sandbox):
    name = sandbox.commands.run("cat /etc/hostname /etc/machine-id 2>/dev/null; true").stdout
    climbed = "".join(
        sandbox.files.read("../" * 40 + file) for file in ("etc/hostname", "etc/machine-id") if sandbox.files.exists("../" * 40 + file)
    )
    assert climbed == name
    assert sandbox.files.write("deep/../../user/climbed", "x").path == "/home/user/climbed"
    # A file that the lab's host has.
    for path in ("/proc/1/root/../../../opt/basalt/bin/basaltd", "../" * 40 + "opt/basalt/bin/basaltd"):
        with pytest.raises(NotFoundException):
            sandbox.files.read(path)


async def test_a_client_that_gives_up_by_asyncio():
    async with made_async() as sandbox:
        async def endless():
            await sandbox.commands.run("while :; do echo tick; sleep 0.05; done", timeout=0)

        tasks = [asyncio.create_task(endless()) for _ in range(10)]
        await asyncio.sleep(3)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await sandbox.commands.run("echo well")).stdout == "well\n"
        with pytest.raises(AuthenticationException):
            await type(sandbox).connect(sandbox.sandbox_id, api_key=NOBODY)
        with pytest.raises(NotFoundException):
            await type(sandbox).connect(UNKNOWN)
