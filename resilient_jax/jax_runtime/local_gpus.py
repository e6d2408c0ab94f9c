"""Which GPUs of one machine each host of a local job gets. Imports no jax.

Where there are fewer GPUs than the hosts ask for, hosts share them, so that recovery on GPUs can be tried with one.
NCCL refuses two processes of a machine on one GPU. What it takes for a machine is `NCCL_HOSTID`: with a value of its
own, each host communicates with the others through sockets, as if it were a machine.
"""

from collections.abc import Mapping, Sequence
from typing import Final

VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"


def list_gpu_shares(gpus: Sequence[str], num_hosts: int, gpus_per_host: int) -> list[tuple[str, ...]]:
    """Return the GPUs of each host: all different where there are enough, else one after the other, in turn.

    >>> list_gpu_shares(("0", "1", "2", "3"), num_hosts=2, gpus_per_host=2)
    [('0', '1'), ('2', '3')]
    >>> list_gpu_shares(("0",), num_hosts=3, gpus_per_host=1)
    [('0',), ('0',), ('0',)]

    Args:
        gpus: all that the machine has, as `CUDA_VISIBLE_DEVICES` names them.
        num_hosts: how many hosts run on the machine.
        gpus_per_host: how many each of them gets; a host's own GPUs are different ones.

    Raises:
        ValueError: the machine has fewer GPUs than one host needs.
    """
    if not 1 <= gpus_per_host <= len(gpus):
        raise ValueError(
            f"found {gpus_per_host} GPUs for each host, expected 1 to {len(gpus)}, as many as there are"
        )
    return [
        tuple(gpus[(host * gpus_per_host + index) % len(gpus)] for index in range(gpus_per_host))
        for host in range(num_hosts)
    ]


def make_gpu_share_environment(
    host: str,
    shares: Sequence[Sequence[str]],
    index: int,
    base: Mapping[str, str],
    *,
    is_on_loopback: bool = True,
) -> dict[str, str]:
    """Return the variables that give a host its GPUs, to be added to `base`.

    Args:
        host: a name that no other host of the machine has.
        shares: the GPUs of each host, by `list_gpu_shares`.
        index: position of the host in `shares`.
        base: what the user has set; it takes precedence, except for the GPUs themselves.
        is_on_loopback: whether hosts reach each other on the loopback device, which NCCL takes only if told; in network
            namespaces of their own they do not.
    """
    variables = {VISIBLE_GPUS: ",".join(shares[index])}
    if has_shared_gpus(shares):
        wanted = {
            "NCCL_HOSTID": f"resilient-jax-{host}",
            "NCCL_IB_DISABLE": "1",
            **({"NCCL_SOCKET_IFNAME": "lo"} if is_on_loopback else {}),
            # By default the first process takes three quarters of the memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        variables |= {name: value for name, value in wanted.items() if name not in base}
    return variables


def has_shared_gpus(shares: Sequence[Sequence[str]]) -> bool:
    """Return whether two hosts have the same GPU."""
    used = [gpu for share in shares for gpu in share]
    return len(set(used)) < len(used)
