"""The gateway over a node without machines (crates/gateway/examples/fake_gateway.rs), for a program that asks it. Knows no endpoint."""

import contextlib
import json
import os
import subprocess
import tempfile

# For it to end.
PATIENCE = 60


@contextlib.contextmanager
def gateway(program, *more):
    """One of its own, which ends with its standard input; its process, and what it says of itself. `more` are its port and its user."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [program, os.path.join(directory, "state"), *more]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                said = process.stdout.readline()
                if not said:
                    raise RuntimeError(f"{program} has ended with {process.wait(PATIENCE)}")
                yield process, json.loads(said)
            finally:
                process.stdin.close()
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
