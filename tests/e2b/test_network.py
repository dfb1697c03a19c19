"""What sandboxes may reach. BASALT_E2B_WORLD names two addresses, with a comma between, at which port 7000 echoes what it is sent."""

import os

import pytest
from conftest import eventually, made
from e2b import ALL_TRAFFIC, NotFoundException, Sandbox, SandboxException

ONE, OTHER = os.environ["BASALT_E2B_WORLD"].split(",")
BOTH = sorted([ONE, OTHER])

# Says which of some addresses echo.
REACH = """
import socket, sys, threading
reached = set()
def ask(address):
    try:
        with socket.create_connection((address, 7000), 4) as s:
            s.settimeout(4)
            s.sendall(b'x')
            if s.recv(1) == b'x':
                reached.add(address)
    except OSError:
        pass
threads = [threading.Thread(target=ask, args=(a,)) for a in sys.argv[1:]]
for t in threads: t.start()
for t in threads: t.join()
print(*sorted(reached))
"""

# Talks over one connection until that is silent, and says so in a file.
TALK = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 7000), 10)
s.settimeout(4)
try:
    while True:
        s.sendall(b'x')
        if s.recv(1) != b'x':
            break
        open('talks', 'w').close()
        time.sleep(0.2)
except OSError:
    pass
open('cut', 'w').close()
"""


def reached(sandbox):
    sandbox.files.write("reach.py", REACH)
    return sandbox.commands.run(f"python3 reach.py {ONE} {OTHER}").stdout.split()


def test_without_rules_everything_is_reached():
    with made() as sandbox:
        assert reached(sandbox) == BOTH
        info = sandbox.get_info()
        assert info.allow_internet_access is None
        assert "deny_out" not in info.network


def test_without_internet_nothing_is_reached():
    with made(allow_internet_access=False) as sandbox:
        assert reached(sandbox) == []
        info = sandbox.get_info()
        assert info.allow_internet_access is False
        assert info.network["deny_out"] == [ALL_TRAFFIC]
        # What the SDK asks of it does not come by its network.
        assert sandbox.commands.run("echo here").stdout == "here\n"


def test_what_is_allowed_is_reached_although_all_is_denied():
    with made(network={"deny_out": lambda ctx: [ctx.all_traffic], "allow_out": [OTHER]}) as sandbox:
        assert reached(sandbox) == [OTHER]
        network = sandbox.get_info().network
        assert (network["allow_out"], network["deny_out"]) == ([OTHER], [ALL_TRAFFIC])


def test_what_is_denied_is_not_reached():
    with made(network={"deny_out": [f"{ONE}/32", "10.0.0.0/8"]}) as sandbox:
        assert reached(sandbox) == [OTHER]


def test_an_update_counts_at_once_and_for_what_is_open():
    with made() as sandbox:
        sandbox.files.write("talk.py", TALK)
        sandbox.commands.run(f"python3 talk.py {ONE}", background=True)
        eventually(lambda: sandbox.files.exists("talks"), "a connection")
        assert not sandbox.files.exists("cut")
        sandbox.update_network({"deny_out": [ALL_TRAFFIC], "allow_out": [OTHER]})
        eventually(lambda: sandbox.files.exists("cut"), "its end")
        assert reached(sandbox) == [OTHER]
        sandbox.update_network({"allow_internet_access": False})
        assert reached(sandbox) == []
        # What is left out is cleared.
        sandbox.update_network({})
        assert reached(sandbox) == BOTH


def test_rules_outlast_a_pause_and_go_along_with_copies():
    with made(network={"deny_out": [ONE]}) as sandbox:
        (copy,) = sandbox.fork(timeout=300)
        try:
            assert reached(copy) == [OTHER]
        finally:
            copy.kill()
        sandbox.pause()
        Sandbox.update_network(sandbox.sandbox_id, {"deny_out": [OTHER]})
        sandbox.connect(timeout=300)
        assert reached(sandbox) == [ONE]


def test_what_cannot_be_a_rule_is_refused():
    for network in [
        {"deny_out": ["example.com"]},
        {"allow_out": ["example.com"], "deny_out": [ALL_TRAFFIC]},
        {"deny_out": ["10.1.2.3/8"]},
        {"deny_out": ["1.1.1.1"] * 1000},
    ]:
        with pytest.raises(SandboxException) as refused:
            Sandbox.create("base", timeout=60, network=network)
        assert "network" in str(refused.value)
    with made() as sandbox:
        with pytest.raises(SandboxException) as refused:
            sandbox.update_network({"deny_out": ["example.com"]})
        assert "example.com" in str(refused.value)
        assert reached(sandbox) == BOTH
    with pytest.raises(NotFoundException):
        Sandbox.update_network("0123456789ab", {})
