"""`attnix demo`: eight agents on one prompt, a killed driver, and the same work without sharing."""
