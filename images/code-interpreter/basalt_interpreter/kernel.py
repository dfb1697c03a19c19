"""One kernel: a process of Jupyter's, from its start to its end.

Runs one piece of code at a time for whoever holds it; does not know contexts, clients, nor what its messages mean to them.
"""

import asyncio
import logging
import os
import subprocess
import uuid
from collections.abc import AsyncIterator

import zmq
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from .languages import Language

# Until a kernel that was started answers, on a busy machine.
START_LIMIT = 120
# A kernel that has replied but no longer says anything is done, even if the message that says so got lost: a channel that is read more
# slowly than it is written to drops messages.
SILENCE = 5
# Messages that wait to be read.
MESSAGES_LIMIT = 20_000

log = logging.getLogger(__name__)


class KernelEnded(Exception):
    """The process is gone, whoever ended it."""


class CannotStart(RuntimeError):
    """No process, or one that does not answer."""


class _Specification(KernelSpecManager):
    """Kernels are started as this package says, whatever else is installed on the machine."""

    def __init__(self, language: Language):
        super().__init__(ensure_native_kernel=False)
        self._language = language

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(argv=list(self._language.command), display_name=self._language.name, language=self._language.name)


class Kernel:
    """States: made -> started -> ended. `ended` is set by the process's end, which Linux tells by a descriptor (pidfd_open(2))."""

    def __init__(self, manager: AsyncKernelManager):
        self._manager = manager
        self._client = manager.client()
        self._ended = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Task | None = None
        self.has_begun = False

    @classmethod
    async def start(cls, language: Language, cwd: str, sockets: str) -> "Kernel":
        """Starts one and waits until it answers. Its sockets and keys are in the directory `sockets`."""
        name = os.path.join(sockets, uuid.uuid4().hex)
        manager = AsyncKernelManager(
            kernel_name=language.name,
            kernel_spec_manager=_Specification(language),
            transport="ipc",
            ip=name,
            connection_file=f"{name}.json",
        )
        manager.context.setsockopt(zmq.RCVHWM, MESSAGES_LIMIT)
        try:
            # What it says by itself nobody reads; what code writes is published by the kernel.
            await manager.start_kernel(cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as failed:
            raise CannotStart(f"a kernel for {language.name} cannot be started in '{cwd}': {failed}") from failed
        kernel = cls(manager)
        kernel._watch()
        try:
            kernel._client.start_channels(stdin=False, hb=False, control=False)
            await kernel._client.wait_for_ready(timeout=START_LIMIT)
        except BaseException as failed:
            await kernel.stop()
            if isinstance(failed, RuntimeError):
                raise CannotStart(f"a kernel for {language.name} was started but does not answer: {failed}") from failed
            raise
        return kernel

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._ended.done()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self._manager.provisioner.pid)

        def gone() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if not self._ended.done():
                self._ended.set_result(None)

        loop.add_reader(descriptor, gone)

    async def run(self, code: str, silent: bool = False) -> AsyncIterator[dict]:
        """Runs code, and yields what the kernel publishes meanwhile. Raises `KernelEnded` if the process goes before that is over."""
        if self.has_ended:
            raise KernelEnded
        asked = self._client.execute(code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False)
        reply = asyncio.ensure_future(self._reply_to(asked))
        try:
            while (message := await self._next(reply)) is not None:
                if message["parent_header"].get("msg_id") != asked:
                    continue
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    break
                yield message
        finally:
            _drop(reply)

    async def _reply_to(self, asked: str) -> None:
        while (await self._client.get_shell_msg())["parent_header"].get("msg_id") != asked:
            pass

    async def _next(self, reply: asyncio.Future) -> dict | None:
        """The next message; none if there will not be another."""
        message = asyncio.ensure_future(self._client.get_iopub_msg())
        try:
            while not message.done():
                waiting = {message, self._ended} if reply.done() else {message, self._ended, reply}
                limit = SILENCE if reply.done() else None
                done, _ = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return None
                if self._ended in done and message not in done:
                    # What it said last may still be on its way.
                    await asyncio.wait({message}, timeout=0.3)
                    if not message.done():
                        raise KernelEnded
            if message.cancelled():
                # Its channels were closed.
                raise KernelEnded
            return message.result()
        finally:
            _drop(message)

    async def interrupt(self) -> None:
        """As Ctrl-C does."""
        if not self.has_ended:
            await self._manager.interrupt_kernel()

    async def stop(self) -> None:
        """Ends the process if it has not ended, and removes what it had."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            await self._manager.shutdown_kernel(now=True)
        except Exception:
            log.exception("a kernel that was to be stopped")
        if not self._ended.done():
            self._ended.set_result(None)
        self._client.stop_channels()


def _drop(future: asyncio.Future) -> None:
    """Nobody waits for it any more, also if it has failed."""
    future.cancel()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
