"""ROS 2 at the rim: topics, lifecycle, threads. The only room that imports rclpy."""
