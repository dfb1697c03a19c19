"""The program `code-interpreter`: its options, and the server from its start to its end."""

import argparse
import asyncio
import json
import logging
import logging.handlers
import os
import pwd
import signal
import tempfile

from tornado.httpclient import AsyncHTTPClient, HTTPClientError

from . import languages
from .contexts import Contexts
from .server import BODY_LIMIT, application

# Where the sandbox's own variables are told, in the sandbox (port of E2B's daemon `envd`).
VARIABLES = "http://127.0.0.1:49983/envs"
VARIABLES_SECONDS = 2
LOG_LIMIT = 1024 * 1024

log = logging.getLogger("code-interpreter")


def options() -> argparse.Namespace:
    """What was said on the command line."""
    parser = argparse.ArgumentParser(prog="code-interpreter", description="Runs code in Jupyter kernels for E2B's code interpreter SDKs.")
    parser.add_argument("--address", default="", help="where to listen (default: all addresses)")
    parser.add_argument("--port", type=int, default=49999)
    parser.add_argument("--cwd", default=os.path.expanduser("~"), help="where code runs that comes with no context (default: the home)")
    parser.add_argument("--preload", default="", metavar="MODULES", help="what the first Python kernel imports at its start, with commas")
    parser.add_argument("--envs-url", default=VARIABLES, help="who tells the sandbox's variables (default: %(default)s)")
    parser.add_argument("--log", metavar="FILE", help="a file for the log, of at most 2 MiB (default: standard error)")
    return parser.parse_args()


def home() -> None:
    """What a program that nobody logged in for may lack."""
    user = pwd.getpwuid(os.getuid())
    if os.environ.get("HOME", "/") == "/":
        os.environ["HOME"] = user.pw_dir
    os.environ.setdefault("USER", user.pw_name)
    os.environ.setdefault("LOGNAME", user.pw_name)


async def variables_of_the_sandbox(url: str) -> languages.Environment | None:
    """What is told there; nothing if what is told is of no use, or comes too late; `None` if nobody is there to ask yet."""
    try:
        reply = await AsyncHTTPClient().fetch(url, connect_timeout=VARIABLES_SECONDS, request_timeout=VARIABLES_SECONDS)
        return languages.checked(json.loads(reply.body))
    except ConnectionRefusedError:
        return None
    except (OSError, HTTPClientError, ValueError) as failed:
        log.warning("the sandbox's variables are not known: %s: %s", url, failed)
        return {}


async def serve(said: argparse.Namespace, sockets: str) -> None:
    """Until a signal ends it."""
    AsyncHTTPClient.configure(None, max_body_size=BODY_LIMIT)
    contexts = Contexts(said.cwd, sockets, lambda: variables_of_the_sandbox(said.envs_url))
    ready, stop = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = application(contexts, ready).listen(said.port, said.address, max_body_size=BODY_LIMIT, body_timeout=60)
    first = contexts.of_language(languages.find(None))
    await first.start()
    await first.preload([module for module in said.preload.split(",") if module])
    ready.set()
    log.info("serving on port %d", said.port)
    await stop.wait()
    server.stop()
    await contexts.close()


def main() -> None:
    """The program."""
    home()
    said = options()
    to = logging.handlers.RotatingFileHandler(said.log, maxBytes=LOG_LIMIT, backupCount=1) if said.log else logging.StreamHandler()
    logging.basicConfig(level=logging.INFO, handlers=[to], format="%(asctime)s %(levelname)s %(message)s")
    with tempfile.TemporaryDirectory(prefix="code-interpreter-") as sockets:
        asyncio.run(serve(said, sockets))


if __name__ == "__main__":
    main()
