"""Fixtures of the cases that need real ROS."""

from test.ros.conftest import ros, ros_domain

__all__ = ["ros", "ros_domain"]
