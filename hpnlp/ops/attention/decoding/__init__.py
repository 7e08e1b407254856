"""The KV cache and the attention of a decoding step."""
