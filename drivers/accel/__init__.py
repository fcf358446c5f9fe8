"""The accel driver: model weights, the paged forward pass, sampling, and the frames of the hbm tier."""
