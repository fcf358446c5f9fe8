"""`attnix bench`: what things cost here, beside a peer and a physical limit measured in the same run."""
