"""The command line `basalt`, which asks the gateway over --host: the program that BASALT names, as somebody on another machine has it."""

import contextlib
import os
import pathlib
import subprocess
import uuid

import pytest
from conftest import eventually

PROGRAM = os.environ.get("BASALT", "")

pytestmark = pytest.mark.skipif(not PROGRAM, reason="BASALT is not set")


def environment():
    """Neither the lab nor a daemon is to be asked, so there is none of either."""
    return os.environ | {"BASALT_HOST": os.environ["E2B_API_URL"], "BASALT_ENGINE": "none"}


def basalt(*words, **options):
    return subprocess.run([PROGRAM, *words], env=environment(), capture_output=True, timeout=200, **options)


@contextlib.contextmanager
def ready(*words):
    """One that runs and has said so; it is gone when the test is over, however that ends."""
    with subprocess.Popen([PROGRAM, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            assert run.stdout.readline() == b"ready\n"
            yield run
        finally:
            run.kill()


def done(*words, **options):
    ran = basalt(*words, **options)
    assert ran.returncode == 0, (words, ran.stderr)
    return ran.stdout.decode()


@pytest.fixture(scope="module")
def name():
    """A sandbox that the tests share, and what it is called."""
    name = f"host-{uuid.uuid4().hex[:8]}"
    done("run", "-d", "--timeout", "30m", "--name", name, "-l", "of=test-host", "base")
    yield name
    basalt("rm", "-f", name)


def test_a_command_has_its_streams_and_its_code():
    ran = basalt("run", "--rm", "base", "--", "sh", "-c", "cat; uname -s; echo err >&2; exit 7", input=b"in\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, b"in\nLinux\n", b"err\n")


def test_sandboxes_are_listed(name):
    assert name in done("ps", "--label", "of=test-host")
    assert f'"name": "{name}"' in done("inspect", name)
    eventually(lambda: name in done("stats", "--no-stream"), "its figures")


def test_megabytes_go_through(name):
    sent = os.urandom(1 << 16) * 64
    assert basalt("exec", name, "cat", input=sent).stdout == sent


def test_signals_end_commands(name):
    script = "trap 'exit 9' INT; echo ready; while :; do sleep 0.1; done"
    with ready("exec", name, "--", "sh", "-c", script) as run:
        run.send_signal(2)
        assert run.wait(60) == 9


def test_files_go_both_ways(name, tmp_path):
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below/file").write_text("text")
    (tree / "script").write_text("echo of the script")
    (tree / "script").chmod(0o755)
    done("cp", str(tree), f"{name}:/tmp/tree")
    done("cp", str(tree / "script"), f"{name}:/tmp/script")
    assert done("exec", name, "--", "sh", "-c", "cat /tmp/tree/below/file; /tmp/script") == "textof the script\n"
    done("cp", f"{name}:/tmp/tree", str(tmp_path / "back"))
    done("cp", f"{name}:/tmp/script", str(tmp_path / "script"))
    assert pathlib.Path(tmp_path / "back/below/file").read_text() == "text"
    assert pathlib.Path(tmp_path / "script").stat().st_mode & 0o777 == 0o755


def test_it_is_suspended_kept_and_cloned(name):
    done("exec", name, "--", "sh", "-c", "echo kept > /tmp/kept")
    done("suspend", name)
    assert basalt("exec", name, "true").returncode == 125
    done("resume", name)
    snapshot, copy = f"{name}-snapshot", f"{name}-copy"
    done("snapshot", "create", name, snapshot)
    try:
        done("clone", "--name", copy, snapshot)
        assert done("exec", copy, "cat", "/tmp/kept") == "kept\n"
    finally:
        basalt("rm", "-f", copy)
        done("snapshot", "rm", snapshot)


def test_a_sandbox_that_goes_ends_its_command():
    name = f"host-{uuid.uuid4().hex[:8]}"
    done("run", "-d", "--timeout", "30m", "--name", name, "base")
    with ready("exec", name, "--", "sh", "-c", "echo ready; exec sleep 1000") as run:
        done("rm", "-f", name)
        said = run.communicate(timeout=100)[1].decode()
    assert run.returncode == 137, said
    assert "has ended, and with it this command" in said
