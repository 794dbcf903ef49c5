"""Backends, one for each device, which run Programs. Only this package knows devices' names."""

HOST, GPU = "cpu", "cuda"
DEVICES = HOST, GPU


def on_host(device: str) -> bool:
    """Whether a device is this machine's processor. Raises ValueError for an unknown device."""
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}, expected one of {', '.join(DEVICES)}")
    return device == HOST


def device_for(n_gpu_layers: int | None) -> str:
    """The device of a model with n_gpu_layers layers on a GPU; None: the host's default."""
    return GPU if n_gpu_layers else HOST
