"""Commands and terminals."""

import pytest
from conftest import eventually, made
from e2b import CommandExitException, PtySize, Sandbox
from e2b.exceptions import NotFoundException, TimeoutException


def test_output_and_exit_code(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "out\n", "err\n")
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo bad; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "bad\n")


def test_a_megabyte_comes_whole_and_in_order(sandbox):
    result = sandbox.commands.run("seq 1 200000")
    assert result.stdout == "".join(f"{number}\n" for number in range(1, 200001))


def test_text_that_is_not_ascii(sandbox):
    assert sandbox.commands.run("printf 'grüße 世界 \\360\\237\\246\\200'").stdout == "grüße 世界 🦀"


def test_output_is_streamed(sandbox):
    lines = []
    sandbox.commands.run("for i in 1 2 3; do echo $i; sleep 0.3; done", on_stdout=lines.append)
    assert "".join(lines) == "1\n2\n3\n" and len(lines) > 1


def test_environment_directory_and_user(sandbox):
    result = sandbox.commands.run("echo $A; pwd; id -un", envs={"A": "b c"}, cwd="/tmp")
    assert result.stdout == "b c\n/tmp\nuser\n"
    assert sandbox.commands.run("pwd; echo $HOME").stdout == "/home/user\n/home/user\n"
    assert sandbox.commands.run("id -un; echo $HOME", user="root").stdout == "root\n/root\n"
    assert sandbox.commands.run("sudo id -un").stdout == "root\n"


def test_a_directory_that_is_not_there_is_refused(sandbox):
    with pytest.raises(Exception) as refused:
        sandbox.commands.run("true", cwd="/no/such/directory")
    assert "/no/such/directory" in str(refused.value)


def test_a_command_in_the_background(sandbox):
    command = sandbox.commands.run("sleep 0.5; echo done; exit 4", background=True)
    assert command.pid in [one.pid for one in sandbox.commands.list()]
    with pytest.raises(CommandExitException) as ended:
        command.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (4, "done\n")
    eventually(lambda: command.pid not in [one.pid for one in sandbox.commands.list()], "the command to be gone")


def test_a_command_goes_on_without_who_started_it_and_is_found_again(sandbox):
    command = sandbox.commands.run("while :; do echo tick; sleep 0.1; done", background=True)
    command.disconnect()
    again = Sandbox.connect(sandbox.sandbox_id).commands.connect(command.pid)
    for stdout, _, _ in again:
        assert "tick" in stdout
        break
    assert sandbox.commands.kill(command.pid) is True
    eventually(lambda: command.pid not in [one.pid for one in sandbox.commands.list()], "the command to be gone")
    assert sandbox.commands.kill(command.pid) is False


def test_standard_input(sandbox):
    command = sandbox.commands.run("cat; echo end", background=True, stdin=True)
    sandbox.commands.send_stdin(command.pid, "one\n")
    command.send_stdin("two\n")
    command.close_stdin()
    assert command.wait().stdout == "one\ntwo\nend\n"


def test_standard_input_is_streamed(sandbox):
    command = sandbox.commands.run("wc -c", background=True, stdin=True)
    sandbox.commands.stream_input(command.pid, iter(["x" * 1000] * 200))
    command.close_stdin()
    assert command.wait().stdout.strip() == "200000"


def test_a_command_that_takes_too_long(sandbox):
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 1000", timeout=2)
    # The limit is the process's own, and not only that of waiting for it.
    eventually(
        lambda: not any("sleep 1000" in " ".join(process.args) for process in sandbox.commands.list()),
        "the command is killed",
    )


def test_a_command_that_nobody_has(sandbox):
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999999)


def test_a_terminal(sandbox):
    terminal = sandbox.pty.create(PtySize(rows=30, cols=100), user="user")
    output = []
    sandbox.pty.send_stdin(terminal.pid, b"stty size; tty\n")
    sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo $TERM; exit 7\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=output.append)
    assert ended.value.exit_code == 7
    text = b"".join(output).decode()
    assert "/dev/pts/" in text and "40 120" in text and "xterm" in text, text


def test_twenty_commands_at_once(sandbox):
    commands = [sandbox.commands.run(f"sleep 1; echo {number}", background=True) for number in range(20)]
    assert [command.wait().stdout for command in commands] == [f"{number}\n" for number in range(20)]


def test_a_server_in_the_sandbox_is_reached_by_the_gateway():
    import os
    import urllib.error
    import urllib.request

    with made() as sandbox:
        sandbox.commands.run("mkdir -p /tmp/www && echo served > /tmp/www/index.html")
        sandbox.commands.run("cd /tmp/www && python3 -m http.server 8000 --bind 127.0.0.1", background=True)
        url = os.environ["E2B_SANDBOX_URL"]

        def get(port):
            headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
            if sandbox.traffic_access_token:
                headers["E2B-Traffic-Access-Token"] = sandbox.traffic_access_token
            try:
                with urllib.request.urlopen(urllib.request.Request(url + "/index.html", headers=headers)) as reply:
                    return reply.status, reply.read().decode()
            except urllib.error.HTTPError as refused:
                return refused.code, refused.read().decode()

        assert eventually(lambda: get(8000)[0] == 200 and get(8000), "the server")[1] == "served\n"
        status, body = get(8001)
        assert status == 502 and "port is not open" in body, body
