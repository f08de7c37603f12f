def launch(kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int) -> None:
    """Start a kernel and make `device` the current one. Arguments are addresses, integers or doubles."""

def unfit(device: int) -> str | None:
    """Return why the device cannot run these kernels, None if it can."""
