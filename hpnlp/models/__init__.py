"""Models: assemblies of modules that can be trained. lm.py: the causal language model. decode.py: text generation."""
