"""Eviction policies: which reclaimable blocks go first when a frame is needed.  One file each, behind `protocol`."""
