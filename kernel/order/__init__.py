"""Scheduling policies: which waiting job is next.  One file each, behind `protocol`; `line` keeps anybody from starving."""
