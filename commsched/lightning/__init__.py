"""Lightning strategies: this import registers the name "commsched" for ``Trainer`` and ``Fabric``.

``Strategy`` and ``FabricStrategy`` take the options of ``DistributedOptimizer``.
"""

from commsched.lightning.fabric import FabricStrategy
from commsched.lightning.trainer import Strategy

__all__ = ["FabricStrategy", "Strategy"]
