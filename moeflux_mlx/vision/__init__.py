"""Reading images: files become patches, and an encoder makes embeddings of these."""
