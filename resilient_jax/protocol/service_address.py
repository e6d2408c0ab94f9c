"""The address of a coordination service: that of its host's agent, and a port on that host's loopback.

JAX's service takes anybody who can connect to it, so it listens on loopback alone, and others reach it through the
agent. No two services of a job have the same address, as no two agents have.
"""

from typing import Final

LOOPBACK: Final = "127.0.0.1"


def format_service_address(agent: str, port: int) -> str:
    """Return the address of a service.

    >>> format_service_address("10.0.0.7:40123", 50321)
    '10.0.0.7:40123/50321'
    """
    return f"{agent}/{port}"


def split_service_address(address: str) -> tuple[str, int]:
    """Return the agent's address and the port on loopback.

    >>> split_service_address("10.0.0.7:40123/50321")
    ('10.0.0.7:40123', 50321)
    """
    agent, _, port = address.rpartition("/")
    return agent, int(port)
