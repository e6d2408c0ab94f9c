"""The event loop thread of synchronous callers: shared, cancellable, alive after an error, and ended at exit."""

import asyncio
import subprocess
import sys
import threading

import pytest

from resilient_jax.transport.event_loop_thread import EventLoopThread, share_event_loop
from tests.support.patience import patience

WAIT_S = patience(1)
EXIT_PROGRAM = """
from resilient_jax.transport import Channel, Credentials, PeerServer, Server
from resilient_jax.transport.event_loop_thread import share_event_loop

async def open_both():
    server = Server(credentials=Credentials("token"))
    await server.start()
    return server, Channel(server.address, Credentials("token"))

server, channel = share_event_loop().run(open_both())
peers = PeerServer("127.0.0.1", Credentials("token"), {}, name="rj-test")  # none is closed
print("done")
"""


@pytest.fixture
def loop():
    loop = EventLoopThread()
    yield loop
    loop.stop()
    loop._loop.close()


async def current_thread():
    return threading.current_thread()


def test_every_caller_of_a_process_gets_the_same_thread():
    assert share_event_loop() is share_event_loop()
    assert share_event_loop().run(current_thread()) is share_event_loop().run(current_thread())


def test_an_error_of_a_coroutine_reaches_its_caller_and_the_loop_continues(loop):
    async def fail():
        raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        loop.run(fail())
    assert loop.run(current_thread()).name == "rj-event-loop"


def test_a_memory_error_of_the_loop_itself_does_not_end_it(loop, monkeypatch):
    failed = threading.Event()
    run_once = loop._loop._run_once

    def fail_once():
        if not failed.is_set():
            failed.set()
            raise MemoryError("no memory for the list of events")
        run_once()

    monkeypatch.setattr(loop._loop, "_run_once", fail_once)
    assert loop.run(current_thread()).name == "rj-event-loop"
    assert failed.wait(WAIT_S)


def test_an_interrupted_caller_cancels_its_coroutine(loop, monkeypatch):
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    submit = loop.submit

    def submit_and_interrupt(coroutine):
        future = submit(coroutine)
        monkeypatch.setattr(future, "result", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
        return future

    started = submit(current_thread())
    started.result(WAIT_S)
    monkeypatch.setattr(loop, "submit", submit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.run(hang())
    assert cancelled.wait(WAIT_S)


def test_a_stopped_loop_refuses_work():
    loop = EventLoopThread()
    loop.stop()
    with pytest.raises(RuntimeError, match="the interpreter is exiting"):
        loop.run(current_thread())
    loop._loop.close()


def test_a_process_with_open_channels_and_servers_exits_silently():
    result = subprocess.run(
        [sys.executable, "-c", EXIT_PROGRAM], capture_output=True, text=True, timeout=patience(6), check=True
    )
    assert (result.stdout, result.stderr) == ("done\n", "")
