"""DreamZero's weights and mathematics, without state: what the network is, never what happened before."""
