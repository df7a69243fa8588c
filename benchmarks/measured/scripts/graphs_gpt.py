"""Train a transformer by hand that is compiled with CUDA graphs (mode "reduce-overhead")."""

from compiled_gpt import train

train("reduce-overhead")
