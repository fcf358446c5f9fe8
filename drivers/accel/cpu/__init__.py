"""The CPU compute engine: paged attention, products and element-wise kernels in C behind cffi."""
