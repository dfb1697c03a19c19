"""Where the tests find their sandboxes: the gateway that E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY lead to, and its template `base`."""

import contextlib
import inspect
import time

import pytest
from api.marks import mark
from e2b import AsyncSandbox, Sandbox

# Sandboxes of tests that were killed go by themselves.
TIMEOUT = 1800


def eventually(ask, what, seconds=60):
    """Asks again and again until the answer is true, and gives it."""
    end = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s, at last {answer!r}")
        time.sleep(0.1)


@contextlib.contextmanager
def made(**options):
    """A sandbox, which goes again."""
    sandbox = Sandbox.create("base", timeout=TIMEOUT, **options)
    try:
        yield sandbox
    finally:
        sandbox.kill()


@contextlib.asynccontextmanager
async def made_async(**options):
    sandbox = await AsyncSandbox.create("base", timeout=TIMEOUT, **options)
    try:
        yield sandbox
    finally:
        await sandbox.kill()


@pytest.fixture(scope="module")
def sandbox():
    """One that the tests of a module share."""
    with made() as sandbox:
        yield sandbox


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """What a test asks for, with what it sets up, stands between two marks in the gateway's log."""
    kind = "python-async" if inspect.iscoroutinefunction(item.function) else "python"
    mark(f"begin {kind} {item.name}")
    try:
        return (yield)
    finally:
        mark("end")
