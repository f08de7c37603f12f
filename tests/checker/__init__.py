"""Random programs of ordinary user actions, compared with plain PyTorch on averaged gradients."""
