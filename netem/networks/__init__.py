"""Descriptions of networks: hosts, links, faults, availability of nodes, and the bound of a broadcast. Pure."""
