"""Templates by the SDK's builder: what is built is there, in sandboxes of it, for as long as it is there."""

import uuid

import pytest
from conftest import TIMEOUT, eventually
from e2b import AsyncSandbox, AsyncTemplate, Sandbox, Template, wait_for_file, wait_for_port
from e2b.api.client import models
from e2b.api.client.api import tags, templates
from e2b.api.client.api.tags import (  # noqa: F401  each is a module of its own, found by its name below
    delete_templates_tags,
    get_templates_template_id_tags,
    get_templates_template_id_tags_count,
    get_templates_template_id_tags_exists,
    get_templates_template_id_tags_groups,
    get_templates_template_id_tags_tag_assignments,
    post_templates_tags,
)
from e2b.api.client.api.templates import (  # noqa: F401
    get_templates_template_id_builds_build_id_logs,
    patch_templates_template_id,
    patch_v_2_templates_template_id,
)
from e2b.exceptions import BuildException, SandboxException, TemplateException
from operations import carried_out, carried_out_by_asyncio

# A guest of the lab has little, and one processor of an emulator.
SIZE = {"cpu_count": 1, "memory_mb": 160}


def unique(name):
    return f"{name}-{uuid.uuid4().hex[:8]}"


def context(directory):
    """What is copied: a directory with one below it, a link, a file that is left out."""
    tree = directory / "app"
    (tree / "deep").mkdir(parents=True)
    (tree / "main.py").write_text("print('built')\n")
    (tree / "deep" / "data.txt").write_text("deep\n")
    (tree / "link").symlink_to("main.py")
    (tree / "secret.key").write_text("no\n")
    (directory / "single.txt").write_text("one\n")
    return directory


def recipe(kind, directory):
    """All kinds of steps, and a server that runs on."""
    return (
        kind(file_context_path=str(context(directory)), file_ignore_patterns=["**/*.key"])
        .from_image("base")
        .copy("app", "/srv/app", mode=0o755)
        .copy("single.txt", "/srv/app/renamed.txt", user="root")
        .set_envs({"GREETING": "hello", "PLACE": "/srv/app"})
        .set_workdir("/srv/app")
        .run_cmd("echo $GREETING > from-run; id -un >> from-run")
        .run_cmd("id -un > /root-was-here", user="root")
        .make_dir("made")
        .set_start_cmd("python3 -m http.server 8000 --directory /srv/app", wait_for_port(8000))
    )


def check(run):
    """A sandbox of it has all of it; `run` runs a command."""
    assert run("cat deep/data.txt main.py") == "deep\nprint('built')\n"
    assert run("readlink link; ls") .split() == ["main.py", "deep", "from-run", "link", "made", "main.py", "renamed.txt"]
    assert run("stat -c %a main.py") == "755\n"
    assert run("stat -c %U:%G main.py renamed.txt").split() == ["user:user", "root:root"]
    assert run("cat from-run /root-was-here; pwd; echo $PLACE") == "hello\nuser\nroot\n/srv/app\n/srv/app\n"
    assert run("curl -s http://127.0.0.1:8000/renamed.txt") == "one\n"


async def told(ask, name, built):
    """What is told of a template and its tags by operations that no method of the SDK asks for."""
    of = {"template_id": built.template_id}
    assigned = await ask(tags.post_templates_tags, 201, body=models.AssignTemplateTagsRequest(target=name, tags=["told"]))
    assert str(assigned.build_id) == built.build_id
    names = [tag.tag for tag in await ask(tags.get_templates_template_id_tags, 200, **of)]
    assert "told" in names
    assert (await ask(tags.get_templates_template_id_tags_count, 200, **of)).total == len(names)
    for tag in ("told", "never"):
        assert (await ask(tags.get_templates_template_id_tags_exists, 200, tag=tag, **of)).exists == (tag in names)
    groups = (await ask(tags.get_templates_template_id_tags_groups, 200, **of)).tags
    assert sorted(group.tag for group in groups) == sorted(names)
    (assignment,) = (await ask(tags.get_templates_template_id_tags_tag_assignments, 200, tag="told", **of)).data
    assert str(assignment.build_id) == built.build_id
    await ask(tags.delete_templates_tags, 204, body=models.DeleteTemplateTagsRequest(name=name.split(":")[0], tags=["told"]))
    logs = await ask(templates.get_templates_template_id_builds_build_id_logs, 200, build_id=built.build_id, **of)
    assert any("ready" in line.message for line in logs.logs)
    for update in (templates.patch_templates_template_id, templates.patch_v_2_templates_template_id):
        await ask(update, 200, body=models.TemplateUpdateRequest(public=False), **of)


def test_a_template_is_built_and_found(tmp_path):
    name = unique("py")
    lines = []
    built = Template.build(recipe(Template, tmp_path), f"{name}:v1", tags=["stable"], on_build_logs=lines.append, **SIZE)
    try:
        assert built.name == f"{name}:v1" and sorted(built.tags) == ["stable", "v1"]
        said = "\n".join(line.message for line in lines)
        assert "COPY app /srv/app" in said and "the template is ready" in said
        assert Template.exists(name) and not Template.exists(unique("none"))
        for reference in (f"{name}:v1", f"{name}:stable"):
            with Sandbox.create(reference, timeout=TIMEOUT) as sandbox:
                assert sandbox.get_info().template_id == built.template_id
                check(lambda command: sandbox.commands.run(command).stdout)
        carried_out(told, f"{name}:v1", built)
        Template.assign_tags(f"{name}:v1", ["default", "prod"])
        assert sorted(tag.tag for tag in Template.get_tags(name)) == ["default", "prod", "stable", "v1"]
        Template.remove_tags(name, "stable")
        assert all(tag.build_id == built.build_id for tag in Template.get_tags(name))
        with pytest.raises(SandboxException, match="404: .* was not found"):
            Sandbox.create(f"{name}:stable")
        with Sandbox.create(name, timeout=TIMEOUT) as sandbox:
            assert sandbox.commands.run("echo $GREETING").stdout == "hello\n"
        # The second time nothing is uploaded, and the name has the new build.
        lines.clear()
        again = Template.build(recipe(Template, tmp_path / "again"), name, on_build_logs=lines.append, **SIZE)
        assert again.template_id == built.template_id and again.build_id != built.build_id
        assert sum("already cached" in line.message for line in lines) == 2
    finally:
        remove(built.template_id)
    assert not Template.exists(name)


def remove(template):
    """Deletes a template, by its id or name: by a snapshot's way, as the SDK has no other."""
    assert Sandbox.delete_snapshot(template)


def test_a_step_that_fails_says_which_and_why():
    name = unique("failing")
    broken = Template().from_image("base").run_cmd("true").run_cmd("echo this is why >&2; exit 3")
    lines = []
    try:
        with pytest.raises(BuildException, match=r"step 2 .*code 3: this is why"):
            Template.build(broken, name, on_build_logs=lines.append, **SIZE)
        assert any("this is why" in line.message for line in lines)
        with pytest.raises(BuildException, match="no image `nobody/has-this`"):
            Template.build(Template().from_image("nobody/has-this"), name, **SIZE)
        with pytest.raises(BuildException, match="basalt pull"):
            Template.build(Template().from_image("x", username="a", password="b"), name, **SIZE)
        with pytest.raises(SandboxException, match="404: .* was not found"):
            Sandbox.create(name)
        assert Template.exists(name)
        Template.build(Template().from_template("base").run_cmd("true"), name)
    finally:
        # A template of which nothing could be built is there, too.
        remove(name)


def test_a_build_goes_on_in_the_background():
    name = unique("slow")
    slow = Template().from_template("base").run_cmd("sleep 2; echo done").set_ready_cmd(wait_for_file("/etc/passwd"))
    started = Template.build_in_background(slow, name)

    def status():
        status = Template.get_build_status(started)
        assert status.status.value != "error", status.reason
        return status.status.value == "ready" and status

    try:
        assert Template.get_build_status(started).status.value in ("waiting", "building")
        ready = eventually(status, "the build", 300)
        assert "done" in [line.message for line in ready.log_entries]
    finally:
        remove(started.template_id)


def test_names_are_checked():
    for name in ("a/b", "x y", "name:"):
        with pytest.raises((BuildException, TemplateException)):
            Template.build(Template().from_image("base"), name)


async def test_the_same_by_asyncio(tmp_path):
    name = unique("async")
    built = await AsyncTemplate.build(recipe(AsyncTemplate, tmp_path), name, **SIZE)
    try:
        assert await AsyncTemplate.exists(name)
        sandbox = await AsyncSandbox.create(name, timeout=TIMEOUT)
        try:
            result = await sandbox.commands.run("cat from-run; curl -s http://127.0.0.1:8000/renamed.txt")
            assert result.stdout == "hello\nuser\none\n"
        finally:
            await sandbox.kill()
        await carried_out_by_asyncio(told, name, built)
    finally:
        assert await AsyncSandbox.delete_snapshot(built.template_id)
