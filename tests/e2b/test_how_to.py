"""The scripts of docs/how-to, as their readers would run them."""

import importlib.util
import os
import pathlib
import subprocess
import sys

from conftest import made
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

SCRIPTS = pathlib.Path(__file__).parents[2] / "docs/how-to/scripts"


def script(name):
    specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Scripted(GenericFakeChatModel):
    """A model that says what it was told to, and keeps what it was asked."""

    asked: list = []

    def bind_tools(self, tools, **_):
        assert [tool.name for tool in tools] == ["run_command", "read_file", "write_file"]
        return self

    def invoke(self, messages, *arguments, **options):
        self.asked[:] = messages
        return super().invoke(messages, *arguments, **options)


def test_the_agent_loop():
    def calls(name, **arguments):
        return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{name}"}])

    said = [
        calls("write_file", path="sum.py", text="import sys; print(sum(map(int, sys.stdin)))"),
        calls("run_command", command="seq 1 10 | python3 sum.py; ls /nothing"),
        calls("read_file", path="/nothing"),
        calls("no_such_tool"),
        AIMessage("The sum is 55."),
    ]
    model = Scripted(messages=iter(said))
    with made() as sandbox:
        assert script("agent_loop").run(model, "Add the numbers from 1 to 10.", sandbox) == "The sum is 55."
        assert sandbox.files.exists("/home/user/sum.py")
    told = [message.content if isinstance(message, ToolMessage) else message["content"] for message in model.asked if is_of_tool(message)]
    assert told[0] == "/home/user/sum.py"
    assert told[1].startswith("exit code 2\n55\n") and "/nothing" in told[1]
    assert told[2].startswith("failed: ") and told[3].startswith("failed: ")


def is_of_tool(message):
    return isinstance(message, ToolMessage) or (isinstance(message, dict) and message["role"] == "tool")


async def test_rollouts():
    actions = iter([10, 20, -5, -1, -2, -3, 22, 1, 2])
    scores = await script("rollouts").rollout(lambda: next(actions), steps=3, width=3)
    # The second step won nothing, so that the third begins where the first had ended.
    assert scores == [-22, -22, 0]


def test_the_ci_runner(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "test_one.py").write_text("import unittest\nclass One(unittest.TestCase):\n    def test_it(self): self.assertEqual(1, 1)\n")
    jobs = ["tests=python3 -m unittest -v && uname -s > artefacts/system", "broken=echo about to fail >&2; exit 3"]
    environment = os.environ | {"ARTEFACTS": str(tmp_path / "kept")}
    command = [sys.executable, SCRIPTS / "ci_runner.py", checkout, *jobs]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "tests | test_it (test_one.One" in ran.stdout and "broken | about to fail" in ran.stdout
    assert "tests: exit code 0" in ran.stdout and "broken: exit code 3" in ran.stdout
    assert (tmp_path / "kept/tests/system").read_text() == "Linux\n"
