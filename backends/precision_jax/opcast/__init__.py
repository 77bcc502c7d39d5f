"""Op-level autocast: a function is traced, and its jaxpr evaluated again with casts decided one primitive at a time."""

from precision_jax.opcast.contract import saving

__all__ = ["saving"]
