"""A short convolution between two gates: each channel sees its last few inputs, and nothing before them."""
