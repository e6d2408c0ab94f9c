"""How a process reaches the store of its job: the embedded one of another process, or an etcd cluster."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from resilient_jax.errors import CallerError, PeerUnreachable
from resilient_jax.store.etcd_address import EtcdAddress, is_etcd_address
from resilient_jax.store.etcd_connection import EtcdUser
from resilient_jax.store.etcd_store import EtcdStore
from resilient_jax.store.remote import RESUME_TIMEOUT_S, RemoteStore
from resilient_jax.transport.credentials import Credentials, TlsFiles

ETCD_USER_VARIABLE: Final = "RESILIENT_JAX_ETCD_USER"
ETCD_PASSWORD_VARIABLE: Final = "RESILIENT_JAX_ETCD_PASSWORD"

OnConnectProgress = Callable[[float, PeerUnreachable], None]
"""A callback after each failed attempt: the seconds since the first one, and the error."""
ConnectedStore = RemoteStore | EtcdStore


@dataclasses.dataclass(frozen=True, slots=True)
class StoreAccess:
    """Where the store is, and what it is shown.

    Attributes:
        address: host:port of an embedded store, or a URL like `etcd://a:2379,b:2379/training`.
        credentials: credentials for an embedded store.
        etcd_tls: certificates for an etcd cluster that is served over TLS; None: without.
        etcd_user: user of an etcd cluster with authentication; None: without.
    """

    address: str
    credentials: Credentials
    etcd_tls: TlsFiles | None = None
    etcd_user: EtcdUser | None = None

    @property
    def is_etcd(self) -> bool:
        """Whether the store is an etcd cluster, and so lives without any process of the job."""
        return is_etcd_address(self.address)

    async def connect(
        self,
        timeout_s: float,
        on_progress: OnConnectProgress | None = None,
        *,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> ConnectedStore:
        """Return a store that has answered; enter it (`async with`), or close it.

        Args:
            timeout_s: limit of all attempts together.
            on_progress: called after each attempt that failed.
            resume_timeout_s: how long a broken watch tries to resume.

        Raises:
            StoreUnreachable: the store did not answer.
            Unauthenticated: the store refused the token or the user; raised at once.
            ConfigError: the address has another form, or a TLS file cannot be read.
        """
        if not self.is_etcd:
            return await RemoteStore.connect(
                self.address, self.credentials, timeout_s, on_progress, resume_timeout_s=resume_timeout_s
            )
        store = EtcdStore(
            EtcdAddress.parse(self.address),
            tls=self.etcd_tls,
            user=self.etcd_user,
            resume_timeout_s=resume_timeout_s,
        )
        try:
            await store.connect(timeout_s, on_progress)
        except BaseException:
            await store.close()
            raise
        return store


def make_store_access(
    address: str, credentials: Credentials, etcd_tls: Path | None, environment: Mapping[str, str] = os.environ
) -> StoreAccess:
    """Return the access to a store, with the etcd user that the environment names.

    Args:
        etcd_tls: folder with cert.pem, key.pem and ca.pem, for an etcd cluster that is served over TLS.

    Raises:
        CallerError: certificates or a user were given for a store that is no etcd cluster, or a user without password.
        ConfigError: the address has another form than one of an etcd cluster.
    """
    name, password = (environment.get(v, "") for v in (ETCD_USER_VARIABLE, ETCD_PASSWORD_VARIABLE))
    if not is_etcd_address(address):
        if etcd_tls is not None:
            raise CallerError(
                f"--store-tls: found the folder {etcd_tls} for the store at {address}, which is no etcd cluster; "
                "expected --store etcd://..., or --tls, which covers the job's own store"
            )
        return StoreAccess(address, credentials)
    EtcdAddress.parse(address)
    if bool(name) != bool(password):
        missing = ETCD_PASSWORD_VARIABLE if name else ETCD_USER_VARIABLE
        raise CallerError(
            f"environment variable {missing}: found nothing, expected the other half of the etcd user"
        )
    return StoreAccess(
        address,
        credentials,
        etcd_tls=TlsFiles.in_folder(etcd_tls) if etcd_tls is not None else None,
        etcd_user=EtcdUser(name, password) if name else None,
    )
