"""Contexts: a kernel each, which goes on where the last execution left it, and the executions that wait for it.

An execution is a task of its own, apart from the request that asked for it: when the client goes, the task goes on until the kernel has
stopped what it did, and only then does the next one get the kernel.

    waiting ──kernel is free──► running ──kernel says so──► done
       │                          │ ├──client gone──► interrupted ──(kernel does not stop: it is replaced)──► done
       └──client gone──► done     └──kernel gone──► error, a new kernel ──► done

Knows no HTTP.
"""

import asyncio
import contextlib
import logging
import os
import uuid

from . import events
from .kernel import CannotStart, Kernel, KernelEnded
from .languages import Environment, Language, Refused

CONTEXTS_LIMIT = 32
# Executions of one context that run or wait.
EXECUTIONS_LIMIT = 64
# Events that wait for a client to read them; then what makes them waits too.
EVENTS_LIMIT = 64
# Seconds between one interrupt and the next of code that nobody waits for any more; then its kernel is replaced.
INTERRUPTS = (1, 4, 10, 20, 25)

log = logging.getLogger(__name__)


class NotThere(LookupError):
    """A context that nobody has."""


class TooMany(RuntimeError):
    """A limit of this server."""


class EnvironmentFailed(RuntimeError):
    """A kernel in which variables cannot be set: something that ran in it has broken it."""


class Execution:
    """What one client reads of one piece of code. Ends with `None`."""

    def __init__(self, code: str, variables: Environment):
        self.code = code
        self.variables = variables
        self.unwanted = asyncio.Event()
        self._events: asyncio.Queue[events.Event | None] = asyncio.Queue(EVENTS_LIMIT)

    async def put(self, event: events.Event | None) -> None:
        """For the client, if it is still there."""
        if not self.unwanted.is_set():
            await self._events.put(event)

    async def next(self) -> events.Event | None:
        """For the client: the next one."""
        return await self._events.get()

    def cancel(self) -> None:
        """The client is gone. Who waits to put something waits no longer, nor does who waits to read it."""
        self.unwanted.set()
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)


class Context:
    """One context. Its kernel is replaced when it has ended."""

    def __init__(self, language: Language, cwd: str, surroundings: "Contexts"):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self._surroundings = surroundings
        self._kernel: Kernel | None = None
        self._lost = ""
        self._removed = False
        self._turn = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()

    def described(self) -> dict[str, str]:
        """As clients know it."""
        return {"id": self.id, "language": self.language.name, "cwd": self.cwd}

    def execute(self, code: str, variables: Environment) -> Execution:
        """Has code run when all that was asked for before has."""
        if len(self._tasks) >= EXECUTIONS_LIMIT:
            raise TooMany(f"{EXECUTIONS_LIMIT} executions run or wait in context {self.id}; wait for some of them to end")
        execution = Execution(code, variables)
        task = asyncio.create_task(self._perform(execution))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return execution

    async def start(self) -> Kernel:
        """Its kernel; a new one if it has none that lives."""
        async with self._starting:
            if self._removed:
                raise NotThere(f"context {self.id} was removed")
            if self._kernel is not None and self._kernel.has_ended:
                await self._kernel.stop()
                self._kernel = None
                self._lost = self._lost or "The kernel of this context had ended and was started anew: its variables are gone.\n"
            if self._kernel is None:
                self._kernel = await Kernel.start(self.language, self.cwd, self._surroundings.sockets)
            return self._kernel

    async def preload(self, modules: list[str]) -> None:
        """Imports modules before anybody waits for it, where the language has something like that."""
        if modules and self.language.preload is not None:
            async with self._turn:
                await self._aside(await self.start(), self.language.preload(modules))

    async def restart(self) -> None:
        """Ends its kernel, with what runs in it, and starts another."""
        if self._kernel is not None:
            await self._kernel.stop()
        await self.start()
        self._lost = ""

    async def remove(self) -> None:
        """Ends its kernel for good."""
        self._removed = True
        async with self._starting:
            if self._kernel is not None:
                await self._kernel.stop()

    async def _perform(self, execution: Execution) -> None:
        try:
            async with self._turn:
                if not execution.unwanted.is_set():
                    await self._run(execution)
        except NotThere as gone:
            await execution.put(events.error("ContextRemoved", str(gone)))
        except (CannotStart, EnvironmentFailed) as failed:
            await execution.put(events.error("KernelFailed", str(failed)))
        except Exception as failed:
            log.exception("context %s", self.id)
            await execution.put(events.error("KernelFailed", f"the kernel of context {self.id} cannot be used: {failed!r}"))
        await execution.put(None)

    async def _run(self, execution: Execution) -> None:
        kernel = await self.start()
        if self._lost:
            for event in events.texts("stderr", self._lost):
                await execution.put(event)
            self._lost = ""
        stopper = asyncio.create_task(self._stop_when_unwanted(execution, kernel))
        try:
            await self._begin(kernel)
            if execution.variables:
                await self._set(kernel, self.language.enter(execution.variables))
            async with contextlib.aclosing(kernel.run(execution.code)) as messages:
                async for message in messages:
                    for event in events.of(message):
                        await execution.put(event)
            if execution.variables:
                await self._aside(kernel, self.language.leave(execution.variables))
            await execution.put(events.END)
        except KernelEnded:
            await self._say_that_it_ended(execution)
        finally:
            stopper.cancel()

    async def _say_that_it_ended(self, execution: Execution) -> None:
        """The next execution has a kernel, and knows of nothing."""
        what = "it was removed" if self._removed else "a new one was started, without the variables of the old one"
        await execution.put(events.error("KernelEnded", f"the kernel of context {self.id} ended while it ran this code; {what}"))
        await execution.put(events.UNEXPECTED_END)
        with contextlib.suppress(NotThere, CannotStart):
            await self.start()
        if not execution.unwanted.is_set():
            self._lost = ""

    async def _begin(self, kernel: Kernel) -> None:
        """The sandbox's own variables, once for each kernel: they may have come after the kernel, which a template has brought."""
        if not kernel.has_begun:
            variables = await self._surroundings.environment()
            await self._set(kernel, self.language.begin(variables or {}))
            kernel.has_begun = variables is not None

    async def _aside(self, kernel: Kernel, code: str) -> str:
        """Runs code of ours, of which clients hear nothing. Gives what went wrong."""
        failed = ""
        async with contextlib.aclosing(kernel.run(code, silent=True)) as messages:
            async for message in messages:
                if message["msg_type"] == "error":
                    failed = f"{message['content']['ename']}: {message['content']['evalue']}"
                    log.warning("context %s: %s", self.id, failed)
        return failed

    async def _set(self, kernel: Kernel, code: str) -> None:
        """Sets variables. Code that counts on them is not run without."""
        failed = await self._aside(kernel, code)
        if failed:
            raise EnvironmentFailed(f"variables cannot be set in the kernel of context {self.id}: {failed}")

    async def _stop_when_unwanted(self, execution: Execution, kernel: Kernel) -> None:
        await execution.unwanted.wait()
        for seconds in INTERRUPTS:
            await kernel.interrupt()
            await asyncio.sleep(seconds)
        log.warning("context %s: its kernel did not stop what nobody waits for any more, and is replaced", self.id)
        await kernel.stop()


class Contexts:
    """All of them, in the order in which they were made, and which of them is meant where a request names only a language."""

    def __init__(self, cwd: str, sockets: str, environment):
        self.sockets = sockets
        self.environment = environment
        self._cwd = cwd
        self._all: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}

    def listed(self) -> list[dict[str, str]]:
        """All, as clients know them."""
        return [context.described() for context in self._all.values()]

    def get(self, id: str) -> Context:
        """The one with this id."""
        context = self._all.get(id)
        if context is None:
            raise NotThere(f"there is no context '{id[:64]}' in this sandbox: it was removed, or is another sandbox's")
        return context

    def of_language(self, language: Language) -> Context:
        """The one for code that comes with no context."""
        context = self._defaults.get(language.name)
        if context is None:
            context = self._defaults[language.name] = self._add(language, self._cwd)
        return context

    async def create(self, language: Language, cwd: str | None) -> Context:
        """A new one, whose kernel runs."""
        context = self._add(language, self._directory(cwd))
        try:
            await context.start()
        except BaseException:
            self._all.pop(context.id, None)
            raise
        return context

    async def remove(self, id: str) -> None:
        """Ends one."""
        context = self.get(id)
        del self._all[id]
        if self._defaults.get(context.language.name) is context:
            del self._defaults[context.language.name]
        await context.remove()

    async def close(self) -> None:
        """Ends all."""
        for id in list(self._all):
            await self.remove(id)

    def _add(self, language: Language, cwd: str) -> Context:
        if len(self._all) >= CONTEXTS_LIMIT:
            raise TooMany(f"there are {CONTEXTS_LIMIT} contexts already; remove one that is no longer needed")
        context = Context(language, cwd, self)
        self._all[context.id] = context
        return context

    def _directory(self, asked: str | None) -> str:
        """Where a kernel is to start; made if it is not there, as clients expect."""
        if asked is None:
            return self._cwd
        path = os.path.join(self._cwd, asked)
        try:
            os.makedirs(path, exist_ok=True)
        except (OSError, ValueError) as failed:
            raise Refused(f"'{asked[:256]}' cannot be a context's directory: {failed}") from failed
        return path
