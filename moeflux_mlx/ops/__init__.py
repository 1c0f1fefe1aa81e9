"""Operations: each with its kernel, its twin in plain MLX, its native CPU form, and the choice between them."""
