"""A script that never calls `rj.run`, for tests of agents alone."""

import signal

while True:
    signal.pause()
