"""`python -m moeflux_mlx.generate`: a prompt in, text out."""
