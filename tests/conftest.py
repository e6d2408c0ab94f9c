"""No test fails because a machine is slow: hypothesis has deadlines of its own unless it is told otherwise."""

from hypothesis import settings

settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")
