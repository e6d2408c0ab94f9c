"""A process that runs an etcd cluster of three members in the folder argv[1] until stdin ends.

It prints the address of the cluster.
"""

import sys
from pathlib import Path

from tests.chaos.etcd_cluster import EtcdCluster

PATIENT = ("--heartbeat-interval=500", "--election-timeout=5000")
"""No elections because thousands of agents share this machine's cores with the members."""


def main() -> None:
    with EtcdCluster(Path(sys.argv[1]), options=PATIENT) as cluster:
        print(cluster.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
