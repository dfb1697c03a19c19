"""The HTTP side: requests are checked here, and what executions say is written out as it comes.

Knows neither kernels nor languages. A refusal is text: the SDKs show it to whoever made the call.
"""

import asyncio
import json

from tornado.iostream import StreamClosedError
from tornado.web import Application, RequestHandler

from . import events, languages
from .contexts import Contexts, NotThere, TooMany
from .kernel import CannotStart

CODE_LIMIT = 8 * 1024 * 1024
BODY_LIMIT = 2 * CODE_LIMIT
PATH_LIMIT = 4096
# Node gives a stream up that is silent for five minutes, and proxies do earlier.
KEEPALIVE = 30


STATUS = {languages.Refused: 400, NotThere: 404, TooMany: 409, CannotStart: 500}


class _Handler(RequestHandler):
    contexts: Contexts
    ready: asyncio.Event

    def initialize(self, contexts: Contexts, ready: asyncio.Event) -> None:
        self.contexts = contexts
        self.ready = ready

    def refuse(self, status: int, message: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(message)

    def write_error(self, status_code: int, **more) -> None:
        """What a method raised, by its kind; the rest is in the log."""
        raised = more.get("exc_info", (None, None, None))[1]
        if type(raised) in STATUS:
            return self.refuse(STATUS[type(raised)], str(raised))
        self.refuse(status_code, self._reason)

    def log_exception(self, kind, value, traceback) -> None:
        if kind not in STATUS:
            super().log_exception(kind, value, traceback)

    def fields(self) -> dict:
        """The request's JSON object; an empty body is an empty one."""
        try:
            fields = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError) as failed:
            raise languages.Refused(f"the body is not JSON: {failed}") from failed
        if not isinstance(fields, dict):
            raise languages.Refused("the body must be a JSON object")
        return fields

    @staticmethod
    def text(fields: dict, name: str, limit: int) -> str | None:
        value = fields.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > limit:
            raise languages.Refused(f"{name} must be a string of at most {limit} characters")
        return value or None


class _Health(_Handler):
    def get(self) -> None:
        if not self.ready.is_set():
            return self.refuse(503, "the first kernel is being started")
        self.refuse(200, "OK")


class _Execute(_Handler):
    _execution = None

    async def post(self) -> None:
        fields = self.fields()
        code = fields.get("code")
        if not isinstance(code, str):
            raise languages.Refused("code must be a string")
        if len(code) > CODE_LIMIT:
            return self.refuse(413, f"code has {len(code)} characters; at most {CODE_LIMIT} are taken: write it to a file and run that")
        id, language = self.text(fields, "context_id", PATH_LIMIT), self.text(fields, "language", PATH_LIMIT)
        if id and language:
            raise languages.Refused("context_id and language exclude each other: a context has its language")
        variables = languages.checked(fields.get("env_vars"))
        context = self.contexts.get(id) if id else self.contexts.of_language(languages.find(language))
        self._execution = context.execute(code, variables)
        await self._stream(self._execution)

    async def _stream(self, execution) -> None:
        """The head goes out at once: the JavaScript SDK waits for it only as long as for any request."""
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("Cache-Control", "no-cache")
        try:
            await self.flush()
            while (event := await self._next(execution)) is not None:
                self.write(events.lines(event))
                await self.flush()
        except StreamClosedError:
            pass
        finally:
            execution.cancel()

    @staticmethod
    async def _next(execution):
        try:
            return await asyncio.wait_for(execution.next(), KEEPALIVE)
        except TimeoutError:
            return events.KEEPALIVE

    def on_connection_close(self) -> None:
        if self._execution is not None:
            self._execution.cancel()


class _Contexts(_Handler):
    def get(self) -> None:
        self.write_json(self.contexts.listed())

    async def post(self) -> None:
        fields = self.fields()
        language = languages.find(self.text(fields, "language", PATH_LIMIT))
        context = await self.contexts.create(language, self.text(fields, "cwd", PATH_LIMIT))
        self.write_json(context.described())

    def write_json(self, value: object) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


class _Context(_Handler):
    async def delete(self, id: str) -> None:
        await self.contexts.remove(id)
        self.set_status(204)


class _Restart(_Handler):
    async def post(self, id: str) -> None:
        await self.contexts.get(id).restart()
        self.set_status(204)


def application(contexts: Contexts, ready: asyncio.Event) -> Application:
    """All that there is to ask for. `ready` is set when the first kernel can be used."""
    shared = {"contexts": contexts, "ready": ready}
    return Application(
        [
            ("/health", _Health, shared),
            ("/execute", _Execute, shared),
            ("/contexts", _Contexts, shared),
            ("/contexts/([^/]+)", _Context, shared),
            ("/contexts/([^/]+)/restart", _Restart, shared),
        ],
        # Every request would be a line.
        log_function=lambda handler: None,
    )
