"""What runs Programs, a backend a device. The names of devices are here and nowhere else."""

HOST, GPU = "cpu", "cuda"
DEVICES = HOST, GPU


def on_host(device: str) -> bool:
    """Whether a device is this machine's processor. Raises ValueError where there is no such."""
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}, expected one of {', '.join(DEVICES)}")
    return device == HOST


def device_for(n_gpu_layers: int | None) -> str:
    """The device of a model with so many layers on a GPU (None: as many as the host alone has)."""
    return GPU if n_gpu_layers else HOST
