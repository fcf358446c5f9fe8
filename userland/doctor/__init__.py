"""`attnix doctor`: what is wrong, with the numbers and the remedy.  One diagnosis per file, behind `finding.Diagnosis`."""
