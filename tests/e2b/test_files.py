"""Files and directories."""

import io
import os

import pytest
from conftest import eventually
from e2b import FileType, FilesystemEventType
from e2b.exceptions import FileNotFoundException, InvalidArgumentException


def test_text_and_bytes(sandbox):
    info = sandbox.files.write("notes/a.txt", "grüße\n")
    assert info.path == "/home/user/notes/a.txt" and info.name == "a.txt"
    assert sandbox.files.read("notes/a.txt") == "grüße\n"
    data = os.urandom(3_000_000)
    sandbox.files.write("/tmp/data", data)
    assert bytes(sandbox.files.read("/tmp/data", format="bytes")) == data
    assert b"".join(sandbox.files.read("/tmp/data", format="stream")) == data
    sandbox.files.write("/tmp/data", io.BytesIO(b"shorter"))
    assert sandbox.files.read("/tmp/data") == "shorter"
    assert sandbox.commands.run("stat -c '%U %a' notes notes/a.txt").stdout == "user 755\nuser 644\n"


def test_several_at_once(sandbox):
    files = [{"path": f"many/{number}", "data": str(number)} for number in range(10)]
    assert len(sandbox.files.write_files(files)) == 10
    assert [sandbox.files.read(f"many/{number}") for number in range(10)] == [str(number) for number in range(10)]


def test_an_empty_file(sandbox):
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == "" and sandbox.files.exists("empty")


def test_a_file_that_is_not_there(sandbox):
    assert sandbox.files.exists("nothing") is False
    for ask in (sandbox.files.read, sandbox.files.get_info, sandbox.files.list):
        with pytest.raises(FileNotFoundException):
            ask("nothing")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/tmp")


def test_directories(sandbox):
    assert sandbox.files.make_dir("tree/deep") is True
    assert sandbox.files.make_dir("tree/deep") is False
    sandbox.files.write("tree/leaf", "x")
    found = {entry.name: entry.type for entry in sandbox.files.list("tree")}
    assert found == {"deep": FileType.DIR, "leaf": FileType.FILE}
    sandbox.files.write("tree/deep/leaf", "x")
    assert {entry.path for entry in sandbox.files.list("tree", depth=2)} == {
        "/home/user/tree/deep",
        "/home/user/tree/deep/leaf",
        "/home/user/tree/leaf",
    }
    assert sandbox.files.rename("tree", "forest").path == "/home/user/forest"
    assert not sandbox.files.exists("tree") and sandbox.files.exists("forest/deep/leaf")
    sandbox.files.remove("forest")
    assert not sandbox.files.exists("forest")


def test_what_is_told_of_a_file(sandbox):
    sandbox.files.write("told", "12345")
    sandbox.commands.run("chmod 600 told; ln -sf told link")
    info = sandbox.files.get_info("told")
    assert (info.size, info.owner, info.group, info.permissions, info.type) == (5, "user", "user", "-rw-------", FileType.FILE)
    link = sandbox.files.get_info("link")
    assert link.symlink_target == "/home/user/told"


def test_metadata(sandbox):
    sandbox.files.write("marked", "x", metadata={"origin": "test"})
    assert sandbox.files.get_info("marked").metadata == {"origin": "test"}


def test_other_users(sandbox):
    sandbox.files.write("/root/secret", "x", user="root")
    assert sandbox.files.get_info("/root/secret", user="root").owner == "root"
    assert sandbox.files.write("mine", "x", user="root").path == "/root/mine"


@pytest.mark.parametrize("recursive", [False, True])
def test_a_directory_is_watched(sandbox, recursive):
    sandbox.commands.run("rm -rf watched && mkdir -p watched/below")
    handle = sandbox.files.watch_dir("watched", recursive=recursive)
    seen = []

    def has(name, kind):
        seen.extend((event.name, event.type) for event in handle.get_new_events())
        return (name, kind) in seen

    sandbox.files.write("watched/a", "x")
    eventually(lambda: has("a", FilesystemEventType.CREATE), "a file that was made")
    sandbox.files.write("watched/a", "y")
    eventually(lambda: has("a", FilesystemEventType.WRITE), "a file that was written")
    sandbox.commands.run("chmod 600 watched/a; mv watched/a watched/b; rm watched/b")
    eventually(lambda: has("a", FilesystemEventType.CHMOD), "a file whose mode was changed")
    eventually(lambda: has("a", FilesystemEventType.RENAME), "a file that was renamed")
    eventually(lambda: has("b", FilesystemEventType.REMOVE), "a file that was removed")
    sandbox.files.write("watched/below/c", "x")
    sandbox.files.write("watched/last", "x")
    eventually(lambda: has("last", FilesystemEventType.CREATE), "the last file")
    assert (("below/c", FilesystemEventType.CREATE) in seen) == recursive
    handle.stop()


def test_signed_urls():
    import urllib.request

    from conftest import made

    with made() as sandbox:
        sandbox.files.write("shared", "signed")
        url = sandbox.download_url("shared")
        if "E2b-Sandbox-Id" not in url:
            # With one URL for all sandboxes a signed one does not name its sandbox: the header does.
            request = urllib.request.Request(url, headers={"E2b-Sandbox-Id": sandbox.sandbox_id})
        assert urllib.request.urlopen(request).read() == b"signed"
