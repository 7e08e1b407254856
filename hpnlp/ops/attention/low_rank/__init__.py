"""Attention through few summaries of the keys: Linformer and Nystromformer."""
