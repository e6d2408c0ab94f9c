"""The address of an etcd cluster: `etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/training`."""

import dataclasses
from typing import Final, Self

from resilient_jax.errors import ConfigError
from resilient_jax.transport.server_address import parse_address

SCHEME: Final = "etcd://"
EXAMPLE: Final = "etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/training"


def is_etcd_address(store: str) -> bool:
    """Return whether the address of a store names an etcd cluster."""
    return store.startswith(SCHEME)


@dataclasses.dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The members of a cluster, and where in it our keys are.

    Attributes:
        endpoints: host:port of each member that is asked, at least one; the first is asked first.
        namespace: what all keys begin with, "" or a path like "/training"; what is outside is not touched.
    """

    endpoints: tuple[str, ...]
    namespace: str = ""

    @classmethod
    def parse(cls, store: str) -> Self:
        """Return the address that a URL like `etcd://a:2379,b:2379/training` stands for.

        Raises:
            ConfigError: the URL has another form.
        """
        hosts, _, path = store.removeprefix(SCHEME).partition("/")
        endpoints = tuple(hosts.split(","))
        if not store.startswith(SCHEME) or "@" in hosts or "?" in store:
            raise ConfigError(
                f"found the store address {store!r}, expected one like {EXAMPLE}; user and password are read from the "
                "environment"
            )
        for endpoint in endpoints:
            try:
                parse_address(endpoint)
            except ConfigError as error:
                raise ConfigError(
                    f"found {endpoint!r} in the store address {store!r}, expected host:port of a member of the etcd "
                    f"cluster, as in {EXAMPLE}"
                ) from error
        name = path.strip("/")
        return cls(endpoints, f"/{name}" if name else "")

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(self.endpoints)}{self.namespace}"
