"""Volumes: their files, asked for without a sandbox and by several, one after another and at once."""

import contextlib
import io
import uuid

import pytest
from conftest import made, made_async
from e2b import AsyncVolume, Sandbox, Volume
from e2b.exceptions import NotFoundException, SandboxException, VolumeException


@contextlib.contextmanager
def volume():
    """A volume, which goes again."""
    volume = Volume.create(f"test-{uuid.uuid4().hex[:12]}")
    try:
        yield volume
    finally:
        Volume.destroy(volume.volume_id)


def test_a_volume_is_made_found_listed_and_removed():
    with volume() as made_one:
        assert made_one.token and made_one.name == made_one.volume_id
        assert made_one.volume_id in [one.volume_id for one in Volume.list()]
        assert Volume.get_info(made_one.volume_id).token == made_one.token
        again = Volume.connect(made_one.volume_id)
        again.write_file("/kept", "x")
        assert made_one.read_file("/kept") == "x"
        with pytest.raises(VolumeException, match="already"):
            Volume.create(made_one.name)
        assert Volume.destroy(made_one.volume_id) is True
        assert Volume.destroy(made_one.volume_id) is False
        with pytest.raises(NotFoundException):
            Volume.connect(made_one.volume_id)
        # Its token opens no later one of the same name.
        later = Volume.create(made_one.name)
        with pytest.raises(NotFoundException):
            made_one.get_info("/")
        assert later.list("/") == []


def test_files_of_a_volume():
    with volume() as data:
        made_file = data.write_file("/a.txt", "one", uid=1000, gid=1001, mode=0o640)
        assert (made_file.size, made_file.uid, made_file.gid, made_file.mode) == (3, 1000, 1001, 0o640)
        with pytest.raises(VolumeException):
            data.write_file("/a.txt", "two", force=False)
        data.write_file("/a.txt", b"\x00\xff", force=True)
        assert data.read_file("/a.txt", format="bytes") == b"\x00\xff"
        data.write_file("/empty", "")
        assert data.read_file("/empty") == ""
        data.write_file("/stream", io.BytesIO(b"s" * 300_000))
        assert b"".join(data.read_file("/stream", format="stream")) == b"s" * 300_000
        with pytest.raises(NotFoundException):
            data.write_file("/none/x", "x")
        assert data.make_dir("/d/e", force=True).type.value == "directory"
        with pytest.raises(VolumeException):
            data.make_dir("/d/e", force=False)
        data.write_file("/d/e/f", "deep")
        assert [one.name for one in data.list("/")] == ["a.txt", "d", "empty", "stream"]
        assert [one.path for one in data.list("/d", depth=2)] == ["/d/e", "/d/e/f"]
        assert data.update_metadata("/d/e/f", mode=0o600).mode == 0o600
        data.remove("/d")
        assert not data.exists("/d") and data.exists("/a.txt")
        for missing in (lambda: data.remove("/d"), lambda: data.list("/d"), lambda: data.read_file("/d"), lambda: data.update_metadata("/d")):
            with pytest.raises(NotFoundException):
                missing()
        with pytest.raises(VolumeException, match=r"\.\."):
            data.read_file("/../../etc/passwd")


def test_sandboxes_share_a_volume():
    with volume() as data:
        with made(volume_mounts={"/mnt/data": data}) as writer, made(volume_mounts={"/mnt/data": data.name}) as reader:
            assert [(one["name"], one["path"]) for one in writer.get_info().volume_mounts] == [(data.name, "/mnt/data")]
            # As the sandbox's own user, who is not root.
            writer.files.write("/mnt/data/hello.txt", "by the first")
            assert reader.files.read("/mnt/data/hello.txt") == "by the first"
            assert data.read_file("/hello.txt") == "by the first"
            data.write_file("/from-outside", "by nobody")
            assert writer.commands.run("cat /mnt/data/from-outside").stdout == "by nobody"
            # A link is the guest's own affair, and leads nowhere here.
            writer.commands.run("ln -s /etc/passwd /mnt/data/link")
            assert data.get_info("/link").target == "/etc/passwd"
            with pytest.raises(NotFoundException):
                data.read_file("/link")
            with pytest.raises(VolumeException, match="end that sandbox first"):
                Volume.destroy(data.volume_id)
        with made(volume_mounts={"/elsewhere": data}) as later:
            assert later.commands.run("cat /elsewhere/hello.txt").stdout == "by the first"


def test_a_volume_is_full_and_has_space_again():
    with volume() as data, made(volume_mounts={"/mnt": data}) as sandbox:
        told = sandbox.commands.run("df --output=size -m /mnt | tail -1").stdout
        assert int(told) < 1100, told
        sandbox.commands.run("fallocate -l 800M /mnt/large")
        failed = sandbox.commands.run("fallocate -l 800M /mnt/more 2>&1 || true").stdout
        assert "No space left" in failed, failed
        sandbox.commands.run("rm -f /mnt/large /mnt/more; echo fits > /mnt/small")
        assert data.read_file("/small") == "fits\n"


def test_a_volume_is_there_after_a_pause_and_in_clones():
    with volume() as data, made(volume_mounts={"/mnt": data}) as sandbox:
        sandbox.files.write("/mnt/before", "x")
        sandbox.pause()
        again = Sandbox.connect(sandbox.sandbox_id)
        assert again.files.read("/mnt/before") == "x"
        again.files.write("/mnt/after", "y")
        assert data.read_file("/after") == "y"
    with volume() as data, made() as sandbox:
        snapshot = sandbox.create_snapshot()
        try:
            clone = Sandbox.create(snapshot.snapshot_id, volume_mounts={"/mnt": data})
            try:
                clone.files.write("/mnt/cloned", "z")
                assert data.read_file("/cloned") == "z"
            finally:
                clone.kill()
        finally:
            Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_what_cannot_be_mounted_is_told():
    with pytest.raises(SandboxException, match="no volume `none`"):
        Sandbox.create("base", volume_mounts={"/mnt": "none"})
    with volume() as data:
        for path in ("relative", "/", "/proc/x"):
            with pytest.raises(SandboxException, match="a volume cannot be at"):
                Sandbox.create("base", volume_mounts={path: data})
        with pytest.raises(SandboxException, match="2 volumes"):
            Sandbox.create("base", volume_mounts={f"/{number}": data for number in range(3)})


async def test_volumes_by_asyncio():
    data = await AsyncVolume.create(f"test-{uuid.uuid4().hex[:12]}")
    try:
        assert data.volume_id in [one.volume_id for one in await AsyncVolume.list()]
        assert (await AsyncVolume.get_info(data.volume_id)).name == data.name
        await data.make_dir("/d")
        await data.write_file("/d/a", "x")
        await data.update_metadata("/d/a", mode=0o666)
        assert [one.mode for one in await data.list("/d")] == [0o666]
        async with made_async(volume_mounts={"/mnt": data}) as sandbox:
            await sandbox.files.write("/mnt/d/a", "y")
        assert await data.read_file("/d/a") == "y"
        assert (await data.get_info("/d/a")).size == 1
        await data.remove("/d/a")
        assert not await data.exists("/d/a")
    finally:
        assert await AsyncVolume.destroy(data.volume_id)
