def launch(kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int) -> None:
    """Start a kernel; arguments are addresses or integers, and doubles. Makes the device the current one."""

def unfit(device: int) -> str | None:
    """Why the device cannot run these kernels, None where it can."""
