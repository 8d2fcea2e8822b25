"""DreamZero on a robot: cameras and joint states in, joint trajectories out, the model in the node's process."""

__version__ = "0.1.0"
