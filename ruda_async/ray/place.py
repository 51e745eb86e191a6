"""Where the ranks of one group meet: chosen by rank 0, and told to the others through Ray."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

from ..launch.plan import Plan, prepare
from ..transport.registry import default_plugin, get_plugin, is_network
from ..url import split_url

__all__ = ["Host", "Place", "job_url"]


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank has to know to join.

    Attributes:
        url: where the ranks meet, with a real port.
        secret: the job secret, drawn for this group.
        world_size: the number of ranks.
    """

    url: str
    secret: str = field(repr=False)
    world_size: int

    def variables(self, rank: int, listen_fd: int | None = None) -> dict[str, str]:
        """The environment by which ``connect()`` without a URL joins as `rank`."""
        return Plan(self.url, self.world_size, None, _secret=self.secret).variables(rank, listen_fd)


class Host:
    """Rank 0's side: a place with the listening socket that belongs to it, until the group has met."""

    def __init__(self, url: str | None, world_size: int, address: str, one_node: bool) -> None:
        """Settle the place.

        Args:
            url: as `job_url` takes it.
            world_size: the number of ranks.
            address: this node's, as the others reach it.
            one_node: all ranks are on this node.

        Raises:
            ConfigError, TransportUnavailableError: the URL cannot be used here.
        """
        hidden = ("RUDA_SECRET", "RUDA_SECRET_FILE")  # the others may not have them: draw a fresh one
        environ = {key: value for key, value in os.environ.items() if key not in hidden}
        self._plan = prepare(job_url(url, address, one_node), world_size, environ=environ)
        secret = self._plan.variables(0)["RUDA_SECRET"]
        self.place = Place(self._plan.url, secret, world_size)

    def variables(self) -> dict[str, str]:
        """As `Place.variables`, for rank 0."""
        listener = self._plan.listener
        return self.place.variables(0, None if listener is None else listener.fileno())

    def close(self) -> None:
        """Close the listening socket. Harmless twice."""
        if self._plan.listener is not None:
            self._plan.listener.close()


def job_url(url: str | None, address: str, one_node: bool) -> str:
    """`url` with a host where it needs one, and with a job name that no other group has.

    Args:
        url: None for ``RUDA_URL``, else the most preferred transport that links all ranks.
        address: the host to put in where the URL has none.
        one_node: all ranks are on one host.
    """
    url = (
        url or os.environ.get("RUDA_URL") or f"{default_plugin(network=None if one_node else True).scheme}://"
    )
    parts = split_url(url)
    if not parts.scheme:
        return url  # for `prepare` to refuse
    rest, question, query = url.partition("://")[2].partition("?")
    authority, _, path = rest.partition("/")
    if not parts.host and is_network(get_plugin(parts.scheme)):
        authority = f"[{address}]{authority}" if ":" in address else f"{address}{authority}"
    pieces = (authority, path.strip("/"), f"ray-{secrets.token_hex(4)}")
    return f"{parts.scheme}://{'/'.join(piece for piece in pieces if piece)}{question}{query}"
