"""A server in this process, with real kernels, and clients that see every byte.

    python3.11 -m venv V && V/bin/pip install -r images/code-interpreter/requirements.txt
    V/bin/pip install -r tests/code-interpreter/requirements.txt && V/bin/python -m pytest tests/code-interpreter
"""

import asyncio
import json
import os
import time

import basalt_interpreter
import pytest
from basalt_interpreter.contexts import Contexts
from basalt_interpreter.server import BODY_LIMIT, application
from tornado.httpclient import AsyncHTTPClient

# Kernels import it too.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(basalt_interpreter.__file__))


async def eventually(ask, what, seconds=60):
    """Asks again and again until the answer is true, and gives it."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.02)
    return answer


class Stream:
    """One execution as a client has it: what was asked, and a connection that can be given up."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def next(self):
        """The next event; none at the end."""
        size = int(await self.reader.readline() or b"0", 16)
        line = await self.reader.readexactly(size)
        await self.reader.readline()
        return json.loads(line) if line else None

    def leave(self):
        """The client goes."""
        self.writer.transport.abort()


class Server:
    """The server, as its clients know it; `contexts` is its inside."""

    def __init__(self, contexts, ready, port):
        self.contexts, self.ready, self.port = contexts, ready, port

    async def ask(self, method, path, body=None):
        """A request's status and text."""
        data = json.dumps(body) if body is not None and not isinstance(body, (str, bytes)) else body
        reply = await AsyncHTTPClient().fetch(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            body=data,
            raise_error=False,
            allow_nonstandard_methods=True,
            request_timeout=120,
        )
        return reply.code, reply.body.decode()

    async def run(self, code, **fields):
        """All events of an execution."""
        status, text = await self.ask("POST", "/execute", {"code": code, **fields})
        assert status == 200, text
        return [json.loads(line) for line in text.splitlines()]

    async def text(self, code, **fields):
        """The result of an execution."""
        events = await self.run(code, **fields)
        (result,) = [event for event in events if event["type"] == "result"]
        return result["text"]

    async def stream(self, code, **fields):
        """An execution that is watched as it runs."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"code": code, **fields}).encode()
        writer.write(b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return Stream(reader, writer)


@pytest.fixture
async def server(tmp_path):
    """A fresh one, of a sandbox whose variables a test may set."""
    variables = {}

    async def told():
        return dict(variables)

    (tmp_path / "home").mkdir()
    (tmp_path / "run").mkdir()
    contexts, ready = Contexts(str(tmp_path / "home"), str(tmp_path / "run"), told), asyncio.Event()
    listening = application(contexts, ready).listen(0, "127.0.0.1", max_body_size=BODY_LIMIT)
    (socket,) = listening._sockets.values()
    made = Server(contexts, ready, socket.getsockname()[1])
    made.variables, made.home = variables, tmp_path / "home"
    yield made
    listening.stop()
    await contexts.close()
    await listening.close_all_connections()
