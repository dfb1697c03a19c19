"""The server with real kernels: what it refuses, whom it lets wait, and what becomes of clients and kernels that go."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from basalt_interpreter import contexts, kernel, languages
from basalt_interpreter import server as http
from conftest import eventually


def kinds(events):
    return [event["type"] for event in events]


def pid_of(context):
    return context._kernel._manager.provisioner.pid


async def test_health_waits_for_the_first_kernel(server):
    assert (await server.ask("GET", "/health"))[0] == 503
    server.ready.set()
    assert await server.ask("GET", "/health") == (200, "OK")


async def test_an_execution_is_a_stream_of_lines(server):
    events = await server.run("import sys\nprint('o')\nprint('e', file=sys.stderr)\n1 + 1")
    by_kind = {event["type"]: event for event in events}
    assert kinds(events)[0] == "number_of_executions" and kinds(events)[-1] == "end_of_execution"
    assert by_kind["number_of_executions"]["execution_count"] == 1
    assert (by_kind["stdout"]["text"], by_kind["stderr"]["text"]) == ("o\n", "e\n")
    assert by_kind["result"] == {"type": "result", "is_main_result": True, "text": "2"}
    assert isinstance(by_kind["stdout"]["timestamp"], int)


async def test_lines_are_ascii(server):
    status, text = await server.ask("POST", "/execute", {"code": "print('世界')"})
    assert status == 200 and text.isascii() and "世界" in "".join(json.loads(line).get("text", "") for line in text.splitlines())


@pytest.mark.parametrize(
    "body, status, says",
    [
        ("{", 400, "not JSON"),
        ("[" * 100_000, 400, "not JSON"),
        ("[]", 400, "JSON object"),
        ({}, 400, "code must be a string"),
        ({"code": 1}, 400, "code must be a string"),
        ({"code": "1", "context_id": "a", "language": "python"}, 400, "exclude each other"),
        ({"code": "1", "context_id": "a"}, 404, "no context 'a'"),
        ({"code": "1", "context_id": 7}, 400, "context_id must be a string"),
        ({"code": "1", "language": "javascript"}, 400, "python, bash"),
        ({"code": "1", "env_vars": ["a"]}, 400, "must be an object"),
        ({"code": "1", "env_vars": {"a b": "c"}}, 400, "'a b' cannot be the name"),
        ({"code": "1", "env_vars": {"a": 1}}, 400, "must be a string"),
        ({"code": "1", "env_vars": {"a": "\0"}}, 400, "without NUL"),
        ({"code": "1", "env_vars": {"a": "x" * 140_000}}, 400, "longer than"),
        ({"code": "1", "env_vars": {f"a{number}": "" for number in range(300)}}, 400, "at most 256"),
        ({"code": "x" * (http.CODE_LIMIT + 1)}, 413, "at most"),
    ],
)
async def test_what_is_refused(server, body, status, says):
    code, text = await server.ask("POST", "/execute", body)
    assert code == status and says in text, text[:300]
    assert server.contexts.listed() == [], "a refused request has made a context"


async def test_a_body_that_is_too_long_is_refused(server):
    assert (await server.ask("POST", "/execute", "x" * (http.BODY_LIMIT + 1)))[0] in (400, 599)


async def test_contexts(server):
    (server.home / "there").mkdir()
    status, text = await server.ask("POST", "/contexts", {"language": "Python3", "cwd": "there"})
    made = json.loads(text)
    assert status == 200 and (made["language"], made["cwd"]) == ("python", str(server.home / "there"))
    assert await server.text("import os; os.getcwd()", context_id=made["id"]) == made["cwd"]
    assert json.loads((await server.ask("GET", "/contexts"))[1]) == [made]
    await server.run("x = 1", context_id=made["id"])
    assert (await server.ask("POST", f"/contexts/{made['id']}/restart", ""))[0] == 204
    events = await server.run("x", context_id=made["id"])
    assert events[1]["name"] == "NameError" and "stderr" not in kinds(events)
    assert (await server.ask("DELETE", f"/contexts/{made['id']}"))[0] == 204
    for method, path in (("DELETE", ""), ("POST", "/restart")):
        status, text = await server.ask(method, f"/contexts/{made['id']}{path}")
        assert status == 404 and made["id"] in text


async def test_a_directory_that_cannot_be_is_refused(server):
    (server.home / "file").write_text("")
    for cwd in ("/proc/none", "file", "a\0b"):
        status, text = await server.ask("POST", "/contexts", {"cwd": cwd})
        assert status == 400 and "cannot be a context's directory" in text
    assert server.contexts.listed() == []


async def test_contexts_are_bounded(server, monkeypatch):
    monkeypatch.setattr(contexts, "CONTEXTS_LIMIT", 1)
    await server.run("1")
    status, text = await server.ask("POST", "/contexts", {})
    assert status == 409 and "remove one" in text
    assert (await server.ask("POST", "/execute", {"code": "1", "language": "bash"}))[0] == 409


async def test_executions_that_wait_are_bounded(server, monkeypatch):
    monkeypatch.setattr(contexts, "EXECUTIONS_LIMIT", 2)
    streams = [await server.stream("import time; time.sleep(60)") for _ in range(2)]
    assert (await server.ask("POST", "/execute", {"code": "1"}))[0] == 409
    for stream in streams:
        stream.leave()
    await eventually(lambda: not server.contexts.of_language(languages.PYTHON)._tasks, "both to end")
    assert await server.text("1") == "1"


async def test_one_after_the_other(server):
    code = "import time; seen = globals().setdefault('seen', []); seen.append({0}); time.sleep(0.1); seen.append({0}); seen"
    texts = await asyncio.gather(*(server.text(code.format(number)) for number in range(3)))
    order = json.loads(max(texts, key=len))
    assert order[::2] == order[1::2] and sorted(order[::2]) == [0, 1, 2]


async def test_who_waits_and_leaves_is_not_run(server):
    mark = server.home / "mark"
    first = await server.stream("import time; print('runs', flush=True); time.sleep(60)")
    while (await first.next())["type"] != "stdout":
        pass
    second = await server.stream(f"open({str(mark)!r}, 'w')")
    context = server.contexts.of_language(languages.PYTHON)
    assert len(context._tasks) == 2
    second.leave()
    await eventually(lambda: unwanted(context) == 1, "the second to be known as gone")
    first.leave()
    assert await server.text("1") == "1"
    assert not mark.exists()


def unwanted(context):
    """How many executions of a context are not finished, though their clients are gone."""
    executions = (task.get_coro().cr_frame.f_locals["execution"] for task in context._tasks)
    return sum(execution.unwanted.is_set() for execution in executions)


async def test_code_is_interrupted_when_its_client_goes(server):
    await server.run("kept = 1")
    stream = await server.stream("import time\nprint('runs', flush=True)\ntime.sleep(3600)", env_vars={"A": "b"})
    while (await stream.next())["type"] != "stdout":
        pass
    stream.leave()
    assert await server.text("import os; (kept, os.environ.get('A'))") == "(1, None)"


async def test_code_that_will_not_stop_loses_its_kernel(server, monkeypatch):
    monkeypatch.setattr(contexts, "INTERRUPTS", (0.1, 0.1))
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('runs', flush=True)\ntime.sleep(3600)"
    stream = await server.stream(code)
    while (await stream.next())["type"] != "stdout":
        pass
    stream.leave()
    events = await server.run("1 + 1")
    assert "started anew" in events[0]["text"] and events[2]["text"] == "2"


async def test_output_is_not_held_back(server):
    go = server.home / "go"
    code = f"import os, time\nprint('first', flush=True)\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)"
    stream = await server.stream(code)
    while (event := await stream.next())["type"] != "stdout":
        pass
    assert event["text"] == "first\n"
    go.touch()
    assert (await stream.next())["type"] == "end_of_execution" and await stream.next() is None


async def test_much_output_comes_whole(server):
    events = await server.run("for number in range(300_000):\n    print(number)")
    text = "".join(event["text"] for event in events if event["type"] == "stdout")
    assert text == "".join(f"{number}\n" for number in range(300_000))


async def test_a_silent_execution_says_that_it_lives(server, monkeypatch):
    monkeypatch.setattr(http, "KEEPALIVE", 0.2)
    assert "keepalive" in kinds(await server.run("import time; time.sleep(1)"))


async def test_a_kernel_that_ends_is_replaced_and_that_is_said(server):
    events = await server.run("import os\nos.kill(os.getpid(), 9)")
    assert kinds(events)[-2:] == ["error", "unexpected_end_of_execution"] and events[-2]["name"] == "KernelEnded"
    assert kinds(await server.run("1")) == ["number_of_executions", "result", "end_of_execution"]


async def test_a_kernel_that_ends_while_nothing_runs_is_replaced_and_that_is_said(server):
    await server.run("x = 1")
    context = server.contexts.of_language(languages.PYTHON)
    os.kill(pid_of(context), signal.SIGKILL)
    await eventually(lambda: context._kernel.has_ended, "the end of the kernel")
    events = await server.run("1")
    assert kinds(events)[0] == "stderr" and "started anew" in events[0]["text"] and kinds(events)[-2] == "result"
    assert "stderr" not in kinds(await server.run("1"))


@pytest.mark.parametrize("end", ["DELETE", "POST"])
async def test_a_context_goes_or_starts_anew_while_it_runs(server, end):
    id = json.loads((await server.ask("POST", "/contexts", {}))[1])["id"]
    stream = await server.stream("print('runs', flush=True); import time; time.sleep(3600)", context_id=id)
    while (await stream.next())["type"] != "stdout":
        pass
    waits = await server.stream("1 + 1", context_id=id)
    assert (await server.ask(end, f"/contexts/{id}" + ("/restart" if end == "POST" else "")))[0] == 204
    assert (await stream.next())["name"] == "KernelEnded"
    assert (await stream.next())["type"] == "unexpected_end_of_execution" and await stream.next() is None
    after = [await waits.next() for _ in range(2)]
    assert after[0].get("name") == "ContextRemoved" if end == "DELETE" else after[1]["text"] == "2"


async def test_variables_are_taken_back(server):
    code = "import os; (os.environ.get('A'), os.environ.get('HOME'))"
    before = await server.text(code)
    assert await server.text(code, env_vars={"A": "1", "HOME": "/x"}) == "('1', '/x')"
    await server.run("1 / 0", env_vars={"A": "1"})
    await server.run("import os; del os.environ['A']", env_vars={"A": "1"})
    assert await server.text(code) == before
    names = await server.text("sorted(name for name in globals() if not name.startswith('_'))")
    assert names == "['In', 'Out', 'exit', 'get_ipython', 'open', 'os', 'quit']"
    assert await server.text("len(In)") == "8", "what is set aside is not counted"


async def test_variables_of_the_sandbox_are_there(server):
    server.variables["OF_ALL"] = "1"
    code = "import os; os.environ['OF_ALL']"
    assert await server.text(code) == "1"
    assert await server.text(code, env_vars={"OF_ALL": "2"}) == "2"
    assert await server.text(code) == "1"
    events = await server.run("echo $OF_ALL", language="bash")
    assert events[1]["text"] == "1\n"


async def test_code_does_not_run_without_its_variables(server):
    await server.run("import sys; sys.modules['basalt_interpreter.in_kernel'].enter = None")
    (error,) = await server.run("print('runs')", env_vars={"A": "1"})
    assert error["name"] == "KernelFailed" and "variables cannot be set" in error["value"]


async def test_bash(server):
    events = await server.run("x=1; cd /; echo $x $A; echo bad >&2; false", language="bash", env_vars={"A": "it's\n\"b\" $c"})
    text = "".join(event["text"] for event in events if event["type"] == "stdout")
    assert text == "1 it's \"b\" $c\nbad\n"
    assert (events[-2]["name"], events[-2]["value"]) == ("ExitStatus", "1")
    events = await server.run("echo $x $PWD [$A]; set | grep -c ^__was", language="bash")
    assert "".join(event.get("text", "") for event in events) == "1 / []\n0\n"
    stream = await server.stream("echo runs; sleep 3600", language="bash")
    while (await stream.next())["type"] != "stdout":
        pass
    stream.leave()
    assert (await server.run("echo again", language="bash"))[1]["text"] == "again\n"


async def test_a_kernel_that_cannot_start_is_told_of(server, monkeypatch):
    monkeypatch.setattr(kernel._Specification, "get_kernel_spec", lambda self, name: kernel.KernelSpec(argv=["/no/such/program"]))
    events = await server.run("1")
    assert kinds(events) == ["error"] and "/no/such/program" in events[0]["value"]
    status, text = await server.ask("POST", "/contexts", {})
    assert status == 500 and "/no/such/program" in text
    monkeypatch.undo()
    assert await server.text("1") == "1"


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


async def test_kernels_end_with_the_program(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "basalt_interpreter", "--port", str(port), "--cwd", str(tmp_path), "--preload", "json,none_such"]
    program = subprocess.Popen([*command, "--log", str(log)])
    try:
        await eventually(lambda: log.exists() and "serving" in log.read_text(), "the program to serve")
        (kernel_pid,) = children(program.pid)
        program.kill()
        program.wait()
        await eventually(lambda: not os.path.exists(f"/proc/{kernel_pid}"), "the kernel to end")
    finally:
        program.kill()
        program.wait()
