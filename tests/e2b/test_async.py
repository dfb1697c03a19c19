"""The same by asyncio."""

import asyncio

import pytest
from conftest import made_async
from e2b import AsyncSandbox, CommandExitException, FilesystemEventType, PtySize


async def test_commands_and_files():
    async with made_async(envs={"A": "b"}) as sandbox:
        assert await sandbox.is_running()
        assert (await sandbox.commands.run("echo $A")).stdout == "b\n"
        with pytest.raises(CommandExitException):
            await sandbox.commands.run("exit 1")
        await sandbox.files.write("x", "y")
        assert await sandbox.files.read("x") == "y"
        lines = []
        command = await sandbox.commands.run("cat", background=True, stdin=True, on_stdout=lines.append)
        await sandbox.commands.send_stdin(command.pid, "hello\n")
        await command.close_stdin()
        assert (await command.wait()).stdout == "hello\n" and "".join(lines) == "hello\n"


async def test_a_directory_is_watched():
    async with made_async() as sandbox:
        await sandbox.files.make_dir("watched")
        seen = asyncio.Queue()
        handle = await sandbox.files.watch_dir("watched", on_event=seen.put_nowait)
        await sandbox.files.write("watched/a", "x")
        event = await asyncio.wait_for(seen.get(), 60)
        assert (event.name, event.type) == ("a", FilesystemEventType.CREATE)
        await handle.stop()


async def test_a_terminal():
    async with made_async() as sandbox:
        output = []
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=output.append)
        await sandbox.pty.send_stdin(terminal.pid, b"echo $((6*7)); exit\n")
        await terminal.wait()
        assert b"42" in b"".join(output)


async def test_pause_and_connect():
    async with made_async() as sandbox:
        await sandbox.files.write("x", "y")
        await sandbox.pause()
        again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=300)
        assert await again.files.read("x") == "y"


async def test_twenty_sandboxes_at_once():
    async def one(number):
        async with made_async(metadata={"number": str(number)}) as sandbox:
            result = await sandbox.commands.run(f"echo {number}")
            return result.stdout

    assert await asyncio.gather(*map(one, range(20))) == [f"{number}\n" for number in range(20)]
