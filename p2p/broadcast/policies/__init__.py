"""Who pushes which chunk to whom: the port and its adapters. Pure."""
