"""Models as files that run without hpnlp: StableHLO for JAX, ONNX for other runtimes."""
