"""An agent that works in a sandbox: a chat model of LangChain, three tools, and a loop until the model has nothing more to call.

    pip install e2b langchain langchain-anthropic
    MODEL=anthropic:claude-sonnet-4-5 python3 agent_loop.py "How many lines has /etc/services?"
"""

import os
import sys

from e2b import CommandExitException, Sandbox, SandboxException
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool

SYSTEM = "You work in a Linux machine of your own. Use the tools, and answer when you know."
# What a model is shown of one answer: more is seldom read and always paid for.
MOST = 8000


def tools(sandbox):
    """What the model may do, all of it in this sandbox."""

    @tool
    def run_command(command: str) -> str:
        """Run a shell command, for at most two minutes."""
        try:
            result = sandbox.commands.run(command, timeout=120)
        except CommandExitException as failed:
            # The model is to see it and try something else.
            result = failed
        return f"exit code {result.exit_code}\n{result.stdout}{result.stderr}"[:MOST]

    @tool
    def read_file(path: str) -> str:
        """Read a text file."""
        return sandbox.files.read(path)[:MOST]

    @tool
    def write_file(path: str, text: str) -> str:
        """Write a text file; directories are made."""
        return sandbox.files.write(path, text).path

    return [run_command, read_file, write_file]


def run(model, task, sandbox, steps=20):
    """Asks the model again and again, and does what it calls for; its answer."""
    known = {one.name: one for one in tools(sandbox)}
    model = model.bind_tools(list(known.values()))
    messages = [SystemMessage(SYSTEM), HumanMessage(task)]
    for _ in range(steps):
        answer = model.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return answer.text
        # A step that went wrong can be taken back: sandbox.create_snapshot() here, and Sandbox.create(snapshot_id) there.
        for call in answer.tool_calls:
            try:
                messages.append(known[call["name"]].invoke(call))
            except (SandboxException, KeyError, ValueError) as error:
                messages.append({"role": "tool", "content": f"failed: {error}", "tool_call_id": call["id"]})
    raise TimeoutError(f"no answer after {steps} steps")


if __name__ == "__main__":
    from langchain.chat_models import init_chat_model

    # Whatever becomes of this program, the sandbox goes after ten minutes.
    with Sandbox.create(os.environ.get("TEMPLATE", "base"), timeout=600) as machine:
        print(run(init_chat_model(os.environ["MODEL"]), sys.argv[1], machine))
