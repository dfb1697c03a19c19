"""Operations by the generated client inside the SDK, whose models read the answers: a flow of them is written once, and carried out by its
synchronous client and by asyncio."""

import inspect

import pytest
from e2b import ConnectionConfig
from e2b.api import client_async, client_sync
from e2b.api.client import models


def judged(answer, status):
    assert answer.status_code == status, answer.content
    assert not isinstance(answer.parsed, models.Error)
    return answer.parsed


def carried_out(flow, *arguments):
    client = client_sync.get_api_client(ConnectionConfig())

    async def ask(operation, status, **arguments):
        return judged(operation.sync_detailed(client=client, **arguments), status)

    # Nothing in it waits: it is run to its end by hand.
    with pytest.raises(StopIteration):
        flow(ask, *arguments).send(None)


async def carried_out_by_asyncio(flow, *arguments):
    client = client_async.get_api_client(ConnectionConfig())

    async def ask(operation, status, **arguments):
        answer = operation.asyncio_detailed(client=client, **arguments)
        return judged(await answer if inspect.isawaitable(answer) else answer, status)

    await flow(ask, *arguments)
