"""N independent policies behind one, each in a process of its own."""
