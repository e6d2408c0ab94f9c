"""A process that runs an etcd cluster of three members in the folder argv[1] until stdin ends.

It prints the address of the cluster.
"""

import sys
from pathlib import Path

from tests.support.etcd_cluster import EtcdCluster


def main() -> None:
    with EtcdCluster(Path(sys.argv[1])) as cluster:
        print(cluster.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
