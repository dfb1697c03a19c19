"""Runs a checkout's jobs, each in a fresh sandbox, all at once: output as it comes, the artefacts fetched, and the exit code of the first job
that fails.

    pip install e2b
    python3 ci_runner.py CHECKOUT 'tests=python3 -m unittest -v' 'types=python3 -m compileall -q .'
"""

import asyncio
import io
import os
import pathlib
import sys
import tarfile

from e2b import AsyncSandbox, CommandExitException, FileType

# Where the checkout is in the sandbox, and what of it is kept.
PLACE, ARTEFACTS = "/home/user/checkout", "artefacts"


def packed(checkout):
    """The checkout as an archive, without what git knows of it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(checkout, ".", filter=lambda entry: None if entry.name.split("/")[1:2] == [".git"] else entry)
    return archive.getvalue()


async def job(name, command, archive, kept):
    """One job; its exit code."""
    template = os.environ.get("TEMPLATE", "base")
    # A job that hangs ends with its sandbox, whatever becomes of this program.
    sandbox = await AsyncSandbox.create(template, timeout=3600, metadata={"job": name})
    try:
        await sandbox.files.write("/tmp/checkout.tar.gz", archive)
        await sandbox.commands.run(f"mkdir -p {PLACE}/{ARTEFACTS} && tar -xzf /tmp/checkout.tar.gz -C {PLACE}")
        tell = lambda text: print(*(f"{name} | {line}" for line in text.splitlines()), sep="\n", flush=True)
        try:
            result = await sandbox.commands.run(command, cwd=PLACE, timeout=1800, on_stdout=tell, on_stderr=tell)
        except CommandExitException as failed:
            result = failed
        for entry in await sandbox.files.list(f"{PLACE}/{ARTEFACTS}"):
            if entry.type != FileType.FILE:
                continue
            data = await sandbox.files.read(entry.path, format="bytes")
            (kept / name).mkdir(parents=True, exist_ok=True)
            (kept / name / entry.name).write_bytes(data)
        print(f"{name}: exit code {result.exit_code}", flush=True)
        return result.exit_code
    finally:
        await sandbox.kill()


async def main(checkout, jobs):
    archive, kept = packed(checkout), pathlib.Path(os.environ.get("ARTEFACTS", "artefacts"))
    named = [text.partition("=")[::2] for text in jobs]
    codes = await asyncio.gather(*(job(name, command, archive, kept) for name, command in named))
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
