"""What a network is: hosts, links, faults, comings and goings, and the bound of a broadcast on it. Pure."""
