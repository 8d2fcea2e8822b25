"""How the small network that the package can be tried with is made. Nothing of this runs on a robot."""
