"""A script that never comes to `rj.run`: for tests of agents alone."""

import time

time.sleep(120)
