"""The Triton back end: look-up tables of a layout, and kernels that read them. A launch alone imports Triton."""
