"""A robot at a table, for those who have none: MuJoCo, three cameras, an arm, six things. No clock, no ROS inside."""
