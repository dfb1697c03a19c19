"""Sandboxes as a whole: made, found, listed, paused, forked, ended."""

import datetime
import uuid

import pytest
from conftest import eventually, made
from e2b import Sandbox, SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, NotFoundException, SandboxNotFoundException


def listed(**query):
    pages = Sandbox.list(query=SandboxQuery(**query) if query else None, limit=2)
    found = []
    while pages.has_next:
        found.extend(pages.next_items())
    return found


def test_a_sandbox_lives_and_ends():
    sandbox = Sandbox.create("base", timeout=120, metadata={"who": "lives"}, envs={"GREETING": "hello"})
    try:
        assert sandbox.is_running()
        info = sandbox.get_info()
        assert info.sandbox_id == sandbox.sandbox_id
        assert info.metadata == {"who": "lives"}
        assert info.state == SandboxState.RUNNING
        assert info.cpu_count >= 1 and info.memory_mb >= 64
        left = info.end_at - datetime.datetime.now(datetime.timezone.utc)
        assert 30 < left.total_seconds() <= 125, left
        assert sandbox.commands.run("echo $GREETING").stdout == "hello\n"
        sandbox.set_timeout(300)
        assert sandbox.get_info().end_at > info.end_at
    finally:
        assert sandbox.kill() is True
    assert sandbox.is_running() is False
    assert Sandbox.kill(sandbox.sandbox_id) is False
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info(sandbox.sandbox_id)


def test_a_sandbox_ends_by_itself():
    sandbox = Sandbox.create("base", timeout=15)
    assert sandbox.is_running()
    eventually(lambda: not sandbox.is_running(), "the end of its time", 90)
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_a_key_that_nobody_has_is_refused():
    with pytest.raises(AuthenticationException):
        Sandbox.create("base", api_key="e2b_" + "0" * 64)


def test_a_template_that_is_not_there_is_refused():
    with pytest.raises(SandboxException) as refused:
        Sandbox.create("no-such-template")
    assert "no-such-template" in str(refused.value)


def test_lists_are_filtered_and_paged():
    mark = uuid.uuid4().hex
    ids = []
    try:
        for number in range(3):
            made_now = Sandbox.create("base", timeout=300, metadata={"mark": mark, "number": str(number)})
            ids.append(made_now.sandbox_id)
        assert sorted(one.sandbox_id for one in listed(metadata={"mark": mark})) == sorted(ids)
        (one,) = listed(metadata={"mark": mark, "number": "1"})
        assert one.sandbox_id == ids[1] and one.metadata["number"] == "1"
        assert listed(metadata={"mark": "another"}) == []
        Sandbox.pause(ids[0])
        running = listed(metadata={"mark": mark}, state=[SandboxState.RUNNING])
        paused = listed(metadata={"mark": mark}, state=[SandboxState.PAUSED])
        assert (sorted(one.sandbox_id for one in running), [one.sandbox_id for one in paused]) == (sorted(ids[1:]), ids[:1])
    finally:
        for one in ids:
            Sandbox.kill(one)


def test_a_paused_sandbox_goes_on_where_it_was():
    with made() as sandbox:
        sandbox.files.write("/home/user/kept", "on the disk")
        counter = sandbox.commands.run("i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.1; done", background=True)
        sandbox.commands.run("echo in memory > /dev/shm/kept")
        assert sandbox.pause() is not False
        assert sandbox.pause() is False
        assert Sandbox.get_info(sandbox.sandbox_id).state == SandboxState.PAUSED
        again = Sandbox.connect(sandbox.sandbox_id, timeout=300)
        assert again.files.read("/home/user/kept") == "on the disk"
        assert again.commands.run("cat /dev/shm/kept").stdout == "in memory\n"
        assert counter.pid in [process.pid for process in again.commands.list()]
        # It is empty for a moment whenever it is written.
        before = int(eventually(lambda: again.files.read("/tmp/count").strip(), "the count"))
        eventually(lambda: int(again.files.read("/tmp/count") or 0) > before, "the command to go on")


def test_a_running_sandbox_is_connected_to():
    with made() as sandbox:
        sandbox.files.write("note", "hello")
        other = Sandbox.connect(sandbox.sandbox_id)
        assert other.files.read("note") == "hello"


def test_a_sandbox_is_forked():
    with made(metadata={"who": "parent"}) as sandbox:
        sandbox.files.write("tree", "root")
        sandbox.commands.run("sleep 1000", background=True)
        forks = sandbox.fork(count=2)
        try:
            children = [getattr(fork, "sandbox", fork) for fork in forks]
            assert not any(isinstance(child, Exception) for child in children), children
            assert len({child.sandbox_id for child in children} | {sandbox.sandbox_id}) == 3
            for number, child in enumerate(children):
                assert child.files.read("tree") == "root"
                assert len(child.commands.list()) == 1
                child.files.write("tree", str(number))
            assert sandbox.files.read("tree") == "root"
            assert [child.files.read("tree") for child in children] == ["0", "1"]
        finally:
            for child in children:
                if isinstance(child, Sandbox):
                    child.kill()


def test_a_snapshot_is_what_sandboxes_are_made_of():
    with made() as sandbox:
        sandbox.files.write("state", "before")
        snapshot = sandbox.create_snapshot()
        sandbox.files.write("state", "after")
        pages = sandbox.list_snapshots()
        assert snapshot.snapshot_id in [one.snapshot_id for one in pages.next_items()]
        twin = Sandbox.create(snapshot.snapshot_id, timeout=300, metadata={"who": "twin"}, envs={"A": "b"})
        try:
            assert twin.files.read("state") == "before"
            assert twin.get_info().metadata == {"who": "twin"}
            assert twin.commands.run("echo $A").stdout == "b\n"
        finally:
            twin.kill()
        assert sandbox.files.read("state") == "after"
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False


def test_metrics_tell_what_is_used():
    with made() as sandbox:
        found = eventually(sandbox.get_metrics, "metrics")
        assert found[-1].cpu_count >= 1 and 0 < found[-1].mem_used <= found[-1].mem_total


def test_metrics_have_a_history():
    began = datetime.datetime.now(datetime.timezone.utc)
    hour = datetime.timedelta(hours=1)
    with made() as sandbox:
        # The gateway looks every five seconds.
        found = eventually(lambda: (all := sandbox.get_metrics(start=began - hour, end=began + hour))[2:] and all, "three points")
        times = [one.timestamp for one in found]
        assert times == sorted(set(times))
        assert sandbox.get_metrics(end=began - hour) == []
        assert len(sandbox.get_metrics(start=times[1], end=times[1])) == 1


def test_what_cannot_be_honoured_is_refused():
    for refused, options in {
        "network.allowOut": {"network": {"allow_out": ["example.com"]}},
    }.items():
        with pytest.raises(SandboxException) as error:
            Sandbox.create("base", **options)
        assert refused in str(error.value), error.value
