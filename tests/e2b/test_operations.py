"""Operations that no method of the SDK asks for, or only an older one: by the generated client inside the SDK."""

from conftest import made, made_async
from e2b.api.client import models
from e2b.api.client.api import sandboxes, snapshots, templates
from e2b.api.client.api.sandboxes import (  # noqa: F401  each is a module of its own, found by its name below
    delete_sandboxes_sandbox_id,
    get_sandboxes,
    get_sandboxes_metrics,
    get_sandboxes_sandbox_id,
    get_sandboxes_sandbox_id_logs,
    get_sandboxes_sandbox_id_metrics,
    get_v2_sandboxes,
    get_v_2_sandboxes_sandbox_id_logs,
    post_sandboxes,
    post_sandboxes_sandbox_id_connect,
    post_sandboxes_sandbox_id_pause,
    post_sandboxes_sandbox_id_refreshes,
    post_sandboxes_sandbox_id_resume,
    post_sandboxes_sandbox_id_snapshots,
    post_sandboxes_sandbox_id_timeout,
    post_v_2_sandboxes_sandbox_id_connect,
)
from e2b.api.client.api.snapshots import get_snapshots  # noqa: F401
from e2b.api.client.api.templates import (  # noqa: F401
    delete_templates_template_id,
    get_templates,
    get_templates_aliases_alias,
    get_templates_template_id,
    get_v2_templates,
)
from operations import carried_out, carried_out_by_asyncio

HOUR = 3600


async def flow(ask):
    """One sandbox, from its making by the older endpoint to its end, through every operation."""
    new = models.NewSandbox(template_id="base", timeout=HOUR, metadata={"who": "operations"})
    sandbox = await ask(sandboxes.post_sandboxes, 201, body=new)
    one = sandbox.sandbox_id
    try:
        assert one in [found.sandbox_id for found in await ask(sandboxes.get_sandboxes, 200, metadata="who%3Doperations")]
        assert one in [found.sandbox_id for found in await ask(sandboxes.get_v2_sandboxes, 200, limit=100)]
        detail = await ask(sandboxes.get_sandboxes_sandbox_id, 200, sandbox_id=one)
        assert (detail.state, detail.envd_access_token) == (models.SandboxState.RUNNING, sandbox.envd_access_token)
        assert (await ask(sandboxes.get_sandboxes_sandbox_id_metrics, 200, sandbox_id=one))[-1].mem_total > 0
        assert one in (await ask(sandboxes.get_sandboxes_metrics, 200, sandbox_ids=[one])).sandboxes
        assert (await ask(sandboxes.get_sandboxes_sandbox_id_logs, 200, sandbox_id=one)).logs is not None
        assert (await ask(sandboxes.get_v_2_sandboxes_sandbox_id_logs, 200, sandbox_id=one)).logs is not None
        await ask(sandboxes.post_sandboxes_sandbox_id_timeout, 204, sandbox_id=one, body=models.SandboxTimeoutRequest(timeout=60))
        await ask(sandboxes.post_sandboxes_sandbox_id_refreshes, 204, sandbox_id=one, body=models.SandboxRefreshRequest(duration=HOUR))
        assert (await ask(sandboxes.get_sandboxes_sandbox_id, 200, sandbox_id=one)).end_at > detail.started_at
        await ask(sandboxes.post_sandboxes_sandbox_id_pause, 204, sandbox_id=one, body=models.SandboxPauseRequest())
        await ask(sandboxes.post_sandboxes_sandbox_id_resume, 201, sandbox_id=one, body=models.ResumedSandbox(timeout=HOUR))
        for connect, body in (
            (sandboxes.post_sandboxes_sandbox_id_connect, models.ConnectSandbox(timeout=HOUR)),
            (sandboxes.post_v_2_sandboxes_sandbox_id_connect, models.ConnectSandboxV2(timeout=HOUR)),
        ):
            assert (await ask(connect, 200, sandbox_id=one, body=body)).sandbox_id == one
        snapshot = await ask(sandboxes.post_sandboxes_sandbox_id_snapshots, 201, sandbox_id=one, body=models.SandboxSnapshotRequest())
        listed = await ask(snapshots.get_snapshots, 200, sandbox_id=one)
        assert snapshot.snapshot_id in [found.snapshot_id for found in listed]
        await ask(templates.delete_templates_template_id, 204, template_id=snapshot.snapshot_id)
    finally:
        await ask(sandboxes.delete_sandboxes_sandbox_id, 204, sandbox_id=one)
    for every in (templates.get_templates, templates.get_v2_templates):
        assert "base" in [name for found in await ask(every, 200) for name in found.aliases]
    alias = await ask(templates.get_templates_aliases_alias, 200, alias="base")
    assert (await ask(templates.get_templates_template_id, 200, template_id=alias.template_id)).builds


def test_every_operation_is_read_by_the_sdks_models():
    carried_out(flow)


async def test_every_operation_is_read_by_the_sdks_models_by_asyncio():
    await carried_out_by_asyncio(flow)


def told(api):
    """What envd tells of a sandbox, by the client that its SDK has for files."""
    return api.get("/metrics"), api.get("/envs")


def test_metrics_environment_and_files_that_are_put_together():
    with made(envs={"A": "b"}) as sandbox:
        metrics, environment = told(sandbox._envd_api)
        assert metrics.json()["mem_total"] > 0 and environment.json()["A"] == "b"
        sandbox.files.write_files([{"path": "part-1", "data": "a"}, {"path": "part-2", "data": "b"}])
        parts = {"source_paths": ["/home/user/part-1", "/home/user/part-2"], "destination": "/home/user/whole", "username": "user"}
        assert sandbox._envd_api.post("/files/compose", json=parts).status_code == 200
        assert sandbox.files.read("whole") == "ab" and not sandbox.files.exists("part-1")


async def test_metrics_and_environment_by_asyncio():
    async with made_async(envs={"A": "b"}) as sandbox:
        metrics, environment = told(sandbox._envd_api)
        assert (await metrics).json()["mem_total"] > 0 and (await environment).json()["A"] == "b"
        await sandbox.files.write_files([{"path": "part-1", "data": "a"}, {"path": "part-2", "data": "b"}])
        parts = {"source_paths": ["/home/user/part-1", "/home/user/part-2"], "destination": "/home/user/whole", "username": "user"}
        assert (await sandbox._envd_api.post("/files/compose", json=parts)).status_code == 200
        assert await sandbox.files.read("whole") == "ab"
