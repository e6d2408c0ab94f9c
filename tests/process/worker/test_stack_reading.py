"""Stacks are read while threads run on, with Python's garbage collector as eager as it can be.

The collector calls a hook that lets other threads run, as JAX's does. On CPython 3.11 a process that walks frames while
it may collect dies here of SIGSEGV within seconds.
"""

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path

import resilient_jax
from resilient_jax.threads import Call, read_stacks
from tests.support.patience import patience

LOOKS = 1_000
EAGER = f"""
import gc, itertools, sys, threading, time
import resilient_jax
from resilient_jax.threads import read_stacks

gc.callbacks.append(lambda phase, info: time.sleep(0))
gc.set_threshold(1)
sys.setswitchinterval(5e-4)
calls = [eval(f"lambda *_, {{', '.join(f'a{{n}}=0' for n in range(count))}}: [[]]") for count in range(1, 60)]

def deep(call, depth):
    return deep(call, depth - 1) if depth else call()

ended = threading.Event()
def look():
    for _ in range({LOOKS}):
        time.sleep(1e-4)  # the main thread is somewhere else then
        assert read_stacks()
    ended.set()

threading.Thread(target=look).start()
for turn in itertools.count():
    if ended.is_set():
        break
    deep(calls[turn % len(calls)], turn % 10)
assert gc.isenabled()
print("read", turn)
"""


def test_a_thousand_looks_at_a_thread_that_runs_leave_the_process_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EAGER], capture_output=True, text=True, timeout=patience(8), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("read")


def wait_here(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait()


def test_the_stack_of_a_thread_is_its_calls_the_innermost_first() -> None:
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(begun, end))
    thread.start()
    begun.wait()
    assert thread.ident is not None
    calls = read_stacks()[thread.ident]
    end.set()
    thread.join()
    names = [call.function for call in calls]
    assert names.index("wait_here") < names.index("run")
    assert Call(__file__, "wait_here", wait_here.__code__.co_firstlineno + 2) in calls
    assert thread.ident not in read_stacks()
    assert threading.get_ident() not in read_stacks()


def test_the_collector_is_as_it_was_after_a_look() -> None:
    gc.disable()
    try:
        read_stacks()
        assert not gc.isenabled()
    finally:
        gc.enable()
    read_stacks()
    assert gc.isenabled()


def test_no_other_module_walks_stacks() -> None:
    package = Path(resilient_jax.__file__).parent
    walks = re.compile(r"_current_frames|\bf_back\b|_getframe|settrace|setprofile")
    found = [path.relative_to(package) for path in package.rglob("*.py") if walks.search(path.read_text())]
    assert found == [Path("threads.py")]
