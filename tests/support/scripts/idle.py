"""A script that never calls `rj.run`, for tests of agents alone."""

import time

time.sleep(120)
