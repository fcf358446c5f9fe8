"""The network tier: stored frames as objects of a Redis-protocol store (README of the parts: driver.py)."""
