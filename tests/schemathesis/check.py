"""Has Schemathesis make up requests by the gateway's own document and send them to a gateway over a node without machines: no answer may have
a status of 500 or more but 501, and each must be one that the document has. Afterwards the gateway holds no more descriptors than before.

    python check.py FAKE_GATEWAY [--examples NUMBER] [--seed NUMBER]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from fake_gateway import gateway  # noqa: E402

# For connections that clients have left to be gone.
PATIENCE = 30


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def settled(process, most):
    """Waits until it has no more of them; how many there are at last."""
    end = time.monotonic() + PATIENCE
    while descriptors(process) > most and time.monotonic() < end:
        time.sleep(0.1)
    return descriptors(process)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--examples", type=int, default=20, help="requests that are made up for each operation and phase")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with gateway(asked.program) as (process, told):
        with urllib.request.urlopen(told["url"] + "/openapi.json") as answer:
            document = json.load(answer)
        before = descriptors(process)
        command = [
            sys.executable, "-m", "schemathesis.cli", "--config-file", HERE / "schemathesis.toml", "run", told["url"] + "/openapi.json",
            "--header", f"X-API-Key: {told['key']}", "--seed", str(asked.seed), "--max-examples", str(asked.examples), "--no-color",
            "--request-timeout", "20", "--workers", "2", "--generation-database", "none",
        ]  # fmt: skip
        environment = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
        status = subprocess.run(command, cwd=tempfile.gettempdir(), env=environment).returncode
        after = settled(process, before)
        if process.poll() is not None:
            sys.exit(f"the gateway has ended with {process.returncode}")
        if after > before:
            sys.exit(f"the gateway had {before} descriptors, and has {after} now")
    count = sum(len(item) for item in document["paths"].values())
    print(f"{count} operations, {asked.examples} requests each and phase, seed {asked.seed}; {after} descriptors as before")
    sys.exit(status)


if __name__ == "__main__":
    main()
