"""No test fails because a machine is slow, and a process that crashes says where."""

import os

from hypothesis import settings

# hypothesis has deadlines of its own unless it is told otherwise.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")
# Inherited by all processes that tests start: a crash in native code prints the stacks of its threads.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
