"""Everything a transport plugin needs, and the only module of the library that it imports."""

from __future__ import annotations

from ..errors import (
    AuthenticationError,
    CollectiveCancelledError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    RudaError,
    TransportUnavailableError,
)
from ..installing import how_to_install
from . import wire
from .addresses import listen_for_ranks, no_address, reachable_address, resolve
from .alike import check_alike
from .base import (
    DONE,
    MAX_HEAD,
    Buffer,
    Capabilities,
    DeviceBuffer,
    Envelope,
    Plugin,
    Ready,
    TakenBack,
    Transport,
    UnexpectedMessage,
    never_stale,
    no_peer,
)
from .engine_provider import EngineContexts, EngineProvider, copy_in_turns, ended
from .framed import ByteStream, FramedParameters, FramedTransport, Looking, Spin, Terms, blocking
from .handshake import address_text, prove, read_exactly
from .job import Connection, Job, Meeting, Secret, StreamWrapper
from .locality import host_identity, host_numbers
from .matching import (
    Arrived,
    Inbox,
    Message,
    Receive,
    awaitable,
    copy,
    fail_future,
    gather_bytes,
    scatter,
)
from .mesh import MAX_STRANGERS, Endpoint, Mesh
from .parameters import extract_parameters, merge_parameters, param
from .programs import find_program
from .provider import NativeCall, NativeGroup, NativeReducer, Provider
from .pulse import NO_GOODBYE, Pulse
from .regions import RegionDestroyed, Regions
from .registry import WrapperPlugin, composable_plugins, get_plugin
from .threads import in_thread

__all__ = [
    "DONE",
    "MAX_HEAD",
    "MAX_STRANGERS",
    "NO_GOODBYE",
    "Arrived",
    "AuthenticationError",
    "Buffer",
    "ByteStream",
    "Capabilities",
    "CollectiveCancelledError",
    "CollectiveTimeoutError",
    "CommunicatorClosedError",
    "ConfigError",
    "Connection",
    "DeviceBuffer",
    "Endpoint",
    "EngineContexts",
    "EngineProvider",
    "Envelope",
    "FramedParameters",
    "FramedTransport",
    "Inbox",
    "Job",
    "Looking",
    "Meeting",
    "Mesh",
    "Message",
    "NativeCall",
    "NativeGroup",
    "NativeReducer",
    "PeerLostError",
    "Plugin",
    "ProtocolError",
    "Provider",
    "Pulse",
    "Ready",
    "Receive",
    "RegionDestroyed",
    "Regions",
    "RudaError",
    "Secret",
    "Spin",
    "StreamWrapper",
    "TakenBack",
    "Terms",
    "Transport",
    "TransportUnavailableError",
    "UnexpectedMessage",
    "WrapperPlugin",
    "address_text",
    "awaitable",
    "blocking",
    "check_alike",
    "composable_plugins",
    "copy",
    "copy_in_turns",
    "ended",
    "extract_parameters",
    "fail_future",
    "find_program",
    "gather_bytes",
    "get_plugin",
    "host_identity",
    "host_numbers",
    "how_to_install",
    "in_thread",
    "listen_for_ranks",
    "merge_parameters",
    "never_stale",
    "no_address",
    "no_peer",
    "param",
    "prove",
    "reachable_address",
    "read_exactly",
    "resolve",
    "scatter",
    "wire",
]
