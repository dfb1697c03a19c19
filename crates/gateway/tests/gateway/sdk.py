"""Flows of the unmodified E2B Python SDK against a gateway whose node has no machines.

Run by sdk.rs. Commands run on this host, by the agent that a sandbox would have.
"""

import datetime
import os
import time
import urllib.error
import urllib.request
import uuid

import e2b
from e2b import Sandbox, SandboxQuery, SandboxState


def refused(error, work, *words):
    try:
        work()
    except error as caught:
        for word in words:
            assert word in str(caught), caught
        return
    raise AssertionError(f"no {error.__name__}")


def create_list_get_kill():
    sandbox = Sandbox.create("base", timeout=120, metadata={"user": "a b&c=d+%", "n": "1"}, envs={"A": "b"})
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"user": "a b&c=d+%", "n": "1"}, info.metadata
    assert info.state == SandboxState.RUNNING
    assert info.name == "base" and info.cpu_count == 2 and info.memory_mb == 512
    left = info.end_at - datetime.datetime.now(datetime.timezone.utc)
    assert 110 < left.total_seconds() <= 120, left
    other = Sandbox.create("base", metadata={"n": "2"})
    found = Sandbox.list(query=SandboxQuery(metadata={"user": "a b&c=d+%"})).next_items()
    assert [one.sandbox_id for one in found] == [sandbox.sandbox_id]
    pages = Sandbox.list(limit=1, order="asc")
    ids = []
    while pages.has_next:
        ids += [one.sandbox_id for one in pages.next_items()]
    assert ids == [sandbox.sandbox_id, other.sandbox_id], ids
    since = Sandbox.list(query=SandboxQuery(started_after=info.started_at)).next_items()
    assert len(since) == 2
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    assert Sandbox.list(query=SandboxQuery(started_after=later)).next_items() == []
    assert len(Sandbox.list(query=SandboxQuery(template="base")).next_items()) == 2
    metrics = sandbox.get_metrics()
    assert metrics[0].mem_total == 512 << 20 and metrics[0].cpu_count == 2
    for one in (sandbox, other):
        assert one.kill() is True
    assert sandbox.kill() is False
    refused(e2b.SandboxNotFoundException, sandbox.get_info)
    assert Sandbox.list().next_items() == []


def timeouts():
    sandbox = Sandbox.create("base", timeout=60)
    sandbox.set_timeout(200)
    left = sandbox.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
    assert left.total_seconds() > 190, left
    # It never has less for being connected to.
    Sandbox.connect(sandbox.sandbox_id, timeout=30)
    left = sandbox.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
    assert left.total_seconds() > 180, left
    sandbox.set_timeout(1)
    end = time.monotonic() + 20
    while Sandbox.list().next_items():
        assert time.monotonic() < end
        time.sleep(0.05)
    refused(e2b.SandboxNotFoundException, lambda: sandbox.set_timeout(10))


def pause_and_connect():
    sandbox = Sandbox.create("base", timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    info = sandbox.get_info()
    assert info.lifecycle == {"on_timeout": "pause", "auto_resume": True}, info.lifecycle
    sandbox.pause()
    assert sandbox.get_info().state == SandboxState.PAUSED
    assert sandbox.pause() is False
    paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert [one.sandbox_id for one in paused] == [sandbox.sandbox_id]
    again = Sandbox.connect(sandbox.sandbox_id, timeout=90)
    assert again.sandbox_id == sandbox.sandbox_id
    assert sandbox.get_info().state == SandboxState.RUNNING
    refused(e2b.SandboxException, lambda: sandbox.pause(mode="filesystem"), "400", "memory")
    assert sandbox.kill()
    refused(e2b.SandboxNotFoundException, lambda: Sandbox.connect(sandbox.sandbox_id))


def fork_and_snapshot():
    sandbox = Sandbox.create("base", timeout=300, metadata={"kind": "source"})
    forks = sandbox.fork(count=3, timeout=60)
    ids = {one.sandbox_id for one in forks}
    assert len(ids) == 3 and sandbox.sandbox_id not in ids
    snapshot = sandbox.create_snapshot(name="ready")
    assert snapshot.names == ["ready"], snapshot
    bare = sandbox.create_snapshot()
    listed = Sandbox.list_snapshots().next_items()
    assert [one.snapshot_id for one in listed] == [bare.snapshot_id, snapshot.snapshot_id]
    made = Sandbox.create(snapshot.snapshot_id, timeout=60)
    named = Sandbox.create("ready", timeout=60, metadata={"kind": "copy"})
    assert made.get_info().template_id == snapshot.snapshot_id
    assert made.get_info().metadata == {} and named.get_info().metadata == {"kind": "copy"}
    for one in (snapshot, bare):
        assert Sandbox.delete_snapshot(one.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
    for one in [sandbox, made, named, *forks]:
        assert one.kill()


def refusals():
    refused(e2b.SandboxException, lambda: Sandbox.create("nothing"), "404")
    refused(e2b.AuthenticationException, lambda: Sandbox.create("base", api_key="e2b_" + "0" * 64), "X-API-Key")
    network = {"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"]}
    refused(e2b.SandboxException, lambda: Sandbox.create("base", network=network), "network.allowOut")
    sandbox = Sandbox.create("base", timeout=30, network={"allow_public_traffic": False})
    assert sandbox.traffic_access_token
    assert sandbox.kill()


def commands():
    sandbox = Sandbox.create("base", timeout=120, envs={"GREETING": "hello"})
    assert sandbox.is_running()
    ran = sandbox.commands.run("echo $GREETING; echo $FROM >&2; exit 0")
    assert (ran.stdout, ran.stderr, ran.exit_code) == ("hello\n", "template\n", 0), ran
    refused(e2b.CommandExitException, lambda: sandbox.commands.run("exit 3"), "3")
    handle = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
    assert handle.pid in [one.pid for one in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "word\n")
    assert handle.wait().stdout == "got word\n"
    token = sandbox._envd_access_token
    assert token and len(token) == 64, token
    sandbox.pause()
    assert not sandbox.is_running()
    refused(e2b.TimeoutException, lambda: sandbox.commands.run("true"))
    sandbox.connect()
    assert sandbox.commands.run("echo again").stdout == "again\n"
    assert sandbox.kill()
    assert not sandbox.is_running()


def files_and_ports():
    sandbox = Sandbox.create("base", timeout=120)
    folder = f"/tmp/sdk-{uuid.uuid4()}"
    assert sandbox.files.make_dir(folder)
    sandbox.files.write(f"{folder}/a b.txt", "hällo")
    assert sandbox.files.read(f"{folder}/a b.txt") == "hällo"
    data = os.urandom(3_000_000)
    sandbox.files.write(f"{folder}/raw", data)
    assert bytes(sandbox.files.read(f"{folder}/raw", format="bytes")) == data
    assert sorted(one.name for one in sandbox.files.list(folder)) == ["a b.txt", "raw"]
    refused(e2b.FileNotFoundException, lambda: sandbox.files.read(f"{folder}/none"))
    handle = sandbox.files.watch_dir(folder)
    sandbox.files.write(f"{folder}/new", "x")
    end = time.monotonic() + 10
    events = []
    while not any(one.name == "new" for one in events):
        assert time.monotonic() < end
        events += handle.get_new_events()
        time.sleep(0.05)
    handle.stop()
    serve = f"cd {folder} && exec python3 -u -m http.server 18765 --bind 127.0.0.1"
    server = sandbox.commands.run(serve, background=True)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "18765"}
    request = urllib.request.Request(os.environ["E2B_SANDBOX_URL"] + "/new", headers=headers)
    end = time.monotonic() + 10
    while True:
        try:
            body = urllib.request.urlopen(request).read()
            break
        except urllib.error.HTTPError as error:
            told = error.read()
            assert error.code == 502 and b"port is not open" in told, told
            assert time.monotonic() < end
            time.sleep(0.05)
    assert body == b"x", body
    server.kill()
    sandbox.files.remove(folder)
    assert not sandbox.files.exists(folder)
    sandbox.kill()


for flow in (create_list_get_kill, timeouts, pause_and_connect, fork_and_snapshot, refusals, commands, files_and_ports):
    flow()
    print(flow.__name__)
print("all is well")
