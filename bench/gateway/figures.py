"""Figures of the gateway alone, by the unmodified Python SDK of E2B, natively: over the node of its tests, which has no machines, with the
agent in the same process. Prints a report as `basalt-bench --json` does.

    python figures.py FAKE_GATEWAY

What needs sandboxes is measured by `basalt-bench gateway` in the lab.
"""

import contextlib
import http.client
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import urllib.parse

from e2b import Sandbox, SandboxQuery

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
import fake_gateway  # noqa: E402

RECORDS, STREAMS, MANY = 1000, 200, 100
ROUNDS = 20


@contextlib.contextmanager
def gateway(program):
    """One of its own, which the SDK finds."""
    # A user without a home has no profile that shells would run.
    with fake_gateway.gateway(program, "0", "nobody") as (process, told):
        os.environ |= {"E2B_API_URL": told["url"], "E2B_SANDBOX_URL": told["url"], "E2B_API_KEY": told["key"]}
        yield process


def timed(work):
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def memory(process):
    """MiB that it has of its own in memory."""
    with open(f"/proc/{process.pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:"))


def listed(**metadata):
    """How many there are, by all pages."""
    pages, found = Sandbox.list(query=SandboxQuery(metadata=metadata), limit=100), 0
    while pages.has_next:
        found += len(pages.next_items())
    return found


def pages(connection):
    """The same pages, read and not parsed: what the gateway and the node take of it."""
    found, token = 0, ""
    while token is not None:
        query = f"/v2/sandboxes?metadata=all%3Dyes&limit=100&nextToken={token}"
        connection.request("GET", query, headers={"X-API-Key": os.environ["E2B_API_KEY"]})
        answer = connection.getresponse()
        found += answer.read().count(b'"sandboxID"')
        token = answer.headers["x-next-token"]
    return found


def expect(is_so, what):
    if not is_so:
        sys.exit(f"not measured: {what}")


def figure(name, unit, series, verdicts):
    made = [{"who": who, "samples": samples, "median": statistics.median(samples)} for who, samples in series.items()]
    judged = []
    for who, limit in verdicts.items():
        value = statistics.median(series[who])
        judged.append({"what": who, "value": value, "target": {"at-most": limit}, "reached": value <= limit})
    return {"name": name, "unit": unit, "series": made, "verdicts": judged}


def records(process):
    """Lists of many sandboxes' records, with a filter."""
    for number in range(RECORDS):
        Sandbox.create("base", timeout=3600, metadata={"all": "yes", "number": str(number)})
    all_of_them, read = f"{RECORDS} of {RECORDS} records fit, 100 a page", "the same pages by HTTP, not parsed"
    one, made_one = f"1 of {RECORDS} records fits", "a sandbox is made, with that many there"
    series = {all_of_them: [], read: [], one: [], made_one: []}
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(os.environ["E2B_API_URL"]).netloc)
    expect(listed(all="yes") == pages(connection) == RECORDS and listed(number="7") == 1, "the lists are not whole")
    for round_ in range(ROUNDS):
        series[read].append(timed(lambda: pages(connection)))
        series[all_of_them].append(timed(lambda: listed(all="yes")))
        series[one].append(timed(lambda: listed(number=str(round_))))
        made = []
        series[made_one].append(timed(lambda: made.append(Sandbox.create("base", timeout=60))))
        made[0].kill()
    return figure("Lists with a filter by the Python SDK, over a node without machines", "ms", series, {all_of_them: 50, read: 50, one: 50})


def streams(process):
    """Commands whose output is waited for, all at once."""
    before = memory(process)
    sandboxes = [Sandbox.create("base", timeout=3600) for _ in range(STREAMS // MANY)]
    # They run on this machine, and do not end with the gateway. The SDK has 200 connections at most: one more request would wait for ever, so
    # that all leave before the first one is killed.
    with contextlib.ExitStack() as kills, contextlib.ExitStack() as leaves:
        for sandbox in sandboxes * MANY:
            command = sandbox.commands.run("echo up; sleep 3600", background=True, timeout=0)
            kills.callback(command.kill)
            leaves.callback(command.disconnect)
            expect("up\n" in next(iter(command)), "a command has not begun")
        with_them = memory(process)
    who = f"the gateway with {STREAMS} streams, and the node and the agent of its tests"
    series = {"the same before": [before], who: [with_them]}
    return figure(f"Memory of a gateway that holds {STREAMS} streams", "MiB", series, {who: 64})


def main():
    with gateway(sys.argv[1]) as process:
        held = streams(process)
    with gateway(sys.argv[1]) as process:
        lists = records(process)
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown")
    facts = [
        ["gateway alone: host", f"{platform.release()}, {os.cpu_count()} x {model}"],
        ["gateway alone: program", f"crates/gateway/examples/fake_gateway.rs, {os.path.getsize(sys.argv[1])} bytes"],
        ["gateway alone: load of the host", " ".join(map(str, os.getloadavg()))],
    ]
    json.dump({"facts": facts, "figures": [lists, held], "retried": []}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
