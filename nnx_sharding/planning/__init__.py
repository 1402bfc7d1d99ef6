"""Choose meshes and strategies before there are devices."""

from .calibration import calibrate
from .plan import plan

__all__ = ["calibrate", "plan"]
