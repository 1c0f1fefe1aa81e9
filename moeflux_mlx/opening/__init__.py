"""Opening a model: where it is, its weights, its experts and the kernels that it runs."""
