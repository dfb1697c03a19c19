"""The same by asyncio."""

import asyncio
import uuid

import pytest
from conftest import made_async
from e2b import AsyncSandbox, CommandExitException, FilesystemEventType, FileType, PtySize, SandboxQuery
from e2b.exceptions import FileNotFoundException


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


async def test_a_terminal_has_a_size():
    async with made_async() as sandbox:
        output = []
        terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=output.append)
        await sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
        await sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
        async with asyncio.timeout(60):
            while b"40 120" not in b"".join(output):
                await asyncio.sleep(0.1)
        assert await sandbox.pty.kill(terminal.pid) is True
        assert await sandbox.pty.kill(terminal.pid) is False


async def test_commands_are_found_again_and_killed():
    async with made_async() as sandbox:
        command = await sandbox.commands.run("cat; sleep 1000", background=True, stdin=True)
        assert command.pid in [one.pid for one in await sandbox.commands.list()]
        await command.disconnect()
        lines = []
        again = await sandbox.commands.connect(command.pid, on_stdout=lines.append)

        typed = sandbox.commands.stream_input(command.pid)
        for number in range(3):
            await typed.send(f"{number}\n")
        await typed.close()
        while "".join(lines) != "0\n1\n2\n":
            await asyncio.sleep(0.1)
        assert await sandbox.commands.kill(command.pid) is True
        with pytest.raises(CommandExitException):
            await again.wait()
        assert await sandbox.commands.kill(command.pid) is False


async def test_files_and_directories():
    async with made_async() as sandbox:
        assert await sandbox.files.make_dir("tree/deep") is True
        await sandbox.files.write("tree/leaf", b"x")
        found = {entry.name: entry.type for entry in await sandbox.files.list("tree")}
        assert found == {"deep": FileType.DIR, "leaf": FileType.FILE}
        assert (await sandbox.files.get_info("tree/leaf")).size == 1
        assert (await sandbox.files.rename("tree/leaf", "tree/fruit")).path == "/home/user/tree/fruit"
        await sandbox.files.remove("tree")
        assert not await sandbox.files.exists("tree/fruit")
        with pytest.raises(FileNotFoundException):
            await sandbox.files.read("tree/fruit")


async def test_lists_timeouts_metrics_and_snapshots():
    mark = uuid.uuid4().hex
    async with made_async(metadata={"mark": mark}) as sandbox:
        pages = AsyncSandbox.list(query=SandboxQuery(metadata={"mark": mark}))
        assert [one.sandbox_id for one in await pages.next_items()] == [sandbox.sandbox_id]
        before = (await sandbox.get_info()).end_at
        await sandbox.set_timeout(2000)
        assert (await sandbox.get_info()).end_at > before
        assert (await sandbox.get_metrics())[-1].mem_total > 0
        await sandbox.files.write("state", "before")
        snapshot = await sandbox.create_snapshot()
        assert snapshot.snapshot_id in [one.snapshot_id for one in await sandbox.list_snapshots().next_items()]
        (fork,) = await sandbox.fork(count=1)
        await sandbox.files.write("state", "after")
        twin = await AsyncSandbox.create(snapshot.snapshot_id, timeout=300)
        for other in (fork, twin):
            assert await other.files.read("state") == "before"
            await other.kill()
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is True


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
