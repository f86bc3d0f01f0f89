"""Pretraining of text encoders in phases: causal language modelling, then masked language modelling."""
