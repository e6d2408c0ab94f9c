"""Where the mailboxes of a pipeline's hosts are."""

from resilient_jax.host_exchange import CollectiveExchange, gather_mail_addresses
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.failures import ServiceEnded
from resilient_jax.worker.world import World


class MailAddresses:
    """The addresses of the hosts that this one has trained with last."""

    def __init__(self) -> None:
        self._known: dict[HostName, str] = {}

    def learn(self, world: World, own: str) -> dict[HostName, str]:
        """Return the addresses of all live hosts, which they tell each other; every host must call this.

        Args:
            own: the address of this host, which stays the same as long as the host's worker lives.

        Raises:
            ServiceEnded: an address is not known, and the world can form no clique to ask.
        """
        if world.step_services.mail_sums is None:
            self._known = gather_mail_addresses(CollectiveExchange.between_hosts(world), world.hosts, own)
        elif unknown := sorted(set(world.hosts).difference(self._known)):
            raise ServiceEnded(
                f"pipeline: found no address of {', '.join(unknown)}, expected one of every host: without the "
                "coordination service of their world hosts cannot ask each other. A new world follows"
            )
        return {host: self._known[host] for host in world.hosts}
