"""Programs.  They reach the system through system calls only, and so can yours."""
