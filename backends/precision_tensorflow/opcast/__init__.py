"""Op-level autocast: a traced graph is replayed op by op with casts, as the one table in ``precision.ops`` decides."""

from precision_tensorflow.opcast.transform import Autocast, idle

__all__ = ["Autocast", "idle"]
