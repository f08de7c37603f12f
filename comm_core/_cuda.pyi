def launch(kernel: str, device: int, blocks: int, arguments: tuple[int | float, ...], stream: int) -> None:
    """Start a kernel; arguments are addresses or integers, and doubles."""
