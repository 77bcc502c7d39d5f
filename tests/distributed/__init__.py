"""Several replicas: processes and devices on this machine, with bounded time."""
