"""Ray's own table of keys and values, in a namespace of this library."""

from __future__ import annotations

from ray.experimental import internal_kv

__all__ = ["delete", "get", "put"]

_NAMESPACE = "ruda_async"


def get(key: str) -> bytes | None:
    """The value of `key`; None where there is none."""
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return value


def put(key: str, value: bytes) -> None:
    """Enter a value, in the place of a former one."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def delete(key: str) -> None:
    """Remove `key`, where it is there."""
    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
