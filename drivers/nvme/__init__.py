"""The file tier: stored frames in the slots of one preallocated file, moved with direct I/O.

Read in this order: config.py (settings), slot_file.py (the file: layout, lock, size, what can happen to it), engine.py and
ring_engine.py (how bytes are read and written: a pool of threads, io_uring), inventory.py (what is done once at start),
jobs.py (one transfer, as operations) and driver.py (the backend).
"""
